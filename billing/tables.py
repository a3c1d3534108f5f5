"""The tables of the ledger database: columns, keys, CHECKs and indexes.

Times are BIGINT milliseconds since 1970 (UTC), money is integers, ids are text.

Migrations create these tables; a test compares the two.
"""

from sqlalchemy import CheckConstraint, ForeignKey, ForeignKeyConstraint, Index, UniqueConstraint
from sqlalchemy import text as condition

from billing.columns import integer, not_negative, one_of, table, text
from billing.meters import Meter
from billing.money import QUANTITY_MAX, RATE_PICO_MAX

METERS_SQL = ", ".join(f"'{meter.value}'" for meter in Meter)

organizations = table(
    "organizations",
    text("id", primary_key=True),
    text("name"),
    text("mode"),
    integer("created_at_ms"),
    one_of("mode", "postpaid", "prepaid"),
)

workspaces = table(
    "workspaces",
    text("id", primary_key=True),
    text("organization_id", ForeignKey("organizations.id")),
    text("name"),
    integer("created_at_ms"),
    UniqueConstraint("id", "organization_id"),  # a key's workspace is one of its organisation's
)

api_keys = table(
    "api_keys",
    text("id", primary_key=True),
    text("organization_id", ForeignKey("organizations.id")),
    text("workspace_id", nullable=True),
    text("name"),
    text("kind"),
    text("secret_hash"),
    text("secret_prefix"),
    integer("created_at_ms"),
    integer("revoked_at_ms", nullable=True),
    ForeignKeyConstraint(
        ["workspace_id", "organization_id"], ["workspaces.id", "workspaces.organization_id"]
    ),
    UniqueConstraint("secret_hash"),
    one_of("kind", "customer", "admin"),
    CheckConstraint("(kind = 'customer') = (workspace_id IS NOT NULL)", name="workspace"),
)

price_cards = table(
    "price_cards",
    text("id", primary_key=True),
    text("model_id"),
    integer("version"),
    integer("effective_from_ms"),
    integer("published_at_ms"),
    text("content_hash"),
    UniqueConstraint("model_id", "version"),
)

price_rates = table(
    "price_rates",
    text("price_card_id", ForeignKey("price_cards.id"), primary_key=True),
    text("meter", primary_key=True),
    integer("rate_pico"),
    CheckConstraint(f"meter IN ({METERS_SQL})", name="meter"),
    CheckConstraint(f"rate_pico BETWEEN 0 AND {RATE_PICO_MAX}", name="rate"),
)

accounts = table(
    "accounts",
    text("id", primary_key=True),
    text("organization_id", ForeignKey("organizations.id"), nullable=True),  # NULL: ours
    integer("debits_posted_nanos"),
    integer("credits_posted_nanos"),
    integer("debits_pending_nanos"),
    not_negative("debits_posted_nanos", "credits_posted_nanos", "debits_pending_nanos"),
)

gateways = table(
    "gateways",
    text("boot_id", primary_key=True),
    text("instance_id"),
    text("engine_id"),
    integer("started_at_ms"),
    integer("beats"),
    integer("ended_at_ms", nullable=True),
    text("ended_by", nullable=True),
    not_negative("beats"),
    CheckConstraint("(ended_at_ms IS NULL) = (ended_by IS NULL)", name="ended"),
    Index(
        None,
        "started_at_ms",
        sqlite_where=condition("ended_at_ms IS NULL"),
        postgresql_where=condition("ended_at_ms IS NULL"),
    ),  # few run at a time; their number grows with every start
)

server_secret = table(
    "server_secret",
    integer("id", primary_key=True),
    text("secret_hex"),
    CheckConstraint("id = 1", name="one"),
)

holds = table(
    "holds",
    text("request_id", primary_key=True),
    text("organization_id", ForeignKey("organizations.id")),
    text("workspace_id", ForeignKey("workspaces.id")),
    text("key_id", ForeignKey("api_keys.id")),
    text("account_id", ForeignKey("accounts.id")),
    text("requested_model"),
    text("model_id"),
    text("price_card_id", ForeignKey("price_cards.id")),
    integer("total_tokens"),
    integer("read_tokens"),
    integer("max_tokens"),
    text("writes"),
    integer("stream"),
    integer("amount_nanos"),
    text("owner_boot_id"),
    text("state"),
    integer("started_at_ms"),
    integer("closed_at_ms", nullable=True),
    text("engine_id", nullable=True),  # NULL: opened before a hold named its engine
    one_of("state", "open", "settled", "released"),
    CheckConstraint("(state = 'open') = (closed_at_ms IS NULL)", name="closed"),
    CheckConstraint("stream IN (0, 1)", name="stream"),
    CheckConstraint("read_tokens BETWEEN 0 AND total_tokens", name="read_tokens"),
    not_negative("max_tokens", "amount_nanos"),
    Index(
        None,
        "started_at_ms",
        sqlite_where=condition("state = 'open'"),
        postgresql_where=condition("state = 'open'"),
    ),  # recovery reads the few open holds, once a minute
    Index(None, "closed_at_ms"),  # reports are by booking time
)

booking_clock = table(
    "booking_clock",
    integer("id", primary_key=True),
    integer("last_booked_at_ms"),
    CheckConstraint("id = 1", name="one"),
)

cache_entries = table(
    "cache_entries",
    text("entry_key", primary_key=True),
    text("request_id", ForeignKey("holds.request_id"), primary_key=True),
    integer("tokens"),
    text("ttl_class"),
    integer("ttl_ms"),
    text("state"),
    integer("expires_at_ms"),
    integer("awaited_until_ms", nullable=True),
    one_of("ttl_class", "5m", "1h"),
    one_of("state", "pending", "live"),
    CheckConstraint("tokens > 0 AND ttl_ms > 0", name="positive"),
    Index(None, "request_id"),
    Index(None, "expires_at_ms"),
)

requests = table(
    "requests",
    text("id", ForeignKey("holds.request_id"), primary_key=True),
    text("organization_id", ForeignKey("organizations.id")),
    text("workspace_id", ForeignKey("workspaces.id")),
    text("key_id", ForeignKey("api_keys.id")),
    text("requested_model"),
    text("model_id"),
    text("price_card_id", ForeignKey("price_cards.id")),
    integer("stream"),
    text("status"),
    text("stop_reason", nullable=True),
    text("error_type", nullable=True),
    text("release_reason", nullable=True),
    integer("started_at_ms"),
    integer("first_token_at_ms", nullable=True),
    integer("ended_at_ms"),
    integer("prompt_tokens"),
    integer("input_tokens"),
    integer("cache_read_tokens"),
    integer("cache_write_5m_tokens"),
    integer("cache_write_1h_tokens"),
    integer("output_tokens"),
    integer("charged_nanos"),
    text("writes"),
    text("refused"),
    one_of("status", "completed", "aborted", "failed", "released"),
    CheckConstraint("(status = 'released') = (release_reason IS NOT NULL)", name="release_reason"),
    CheckConstraint("stream IN (0, 1)", name="stream"),
    not_negative(
        "input_tokens",
        "cache_read_tokens",
        "cache_write_5m_tokens",
        "cache_write_1h_tokens",
        "output_tokens",
        "charged_nanos",
    ),
    CheckConstraint(
        "input_tokens + cache_read_tokens + cache_write_5m_tokens + cache_write_1h_tokens"
        " IN (0, prompt_tokens)",
        name="prompt",
    ),  # the prompt is billed whole or not at all
    Index(None, "organization_id", "ended_at_ms"),
)

# What an operator closed by hand, and why.
hold_decisions = table(
    "hold_decisions",
    text("request_id", ForeignKey("requests.id"), primary_key=True),
    text("decision"),
    text("actor"),
    text("reason"),
    integer("decided_at_ms"),
    one_of("decision", "settled", "released"),
)

transfers = table(
    "transfers",
    text("tx_id", primary_key=True),
    integer("seq", primary_key=True),
    text("kind"),
    text("debit_account_id", ForeignKey("accounts.id")),
    text("credit_account_id", ForeignKey("accounts.id")),
    integer("amount_nanos"),
    text("meter", nullable=True),
    integer("quantity", nullable=True),
    integer("rate_pico", nullable=True),
    text("price_card_id", ForeignKey("price_cards.id"), nullable=True),
    text("request_id", ForeignKey("requests.id"), nullable=True),
    integer("effective_at_ms"),
    integer("booked_at_ms"),
    UniqueConstraint("request_id", "meter", "kind"),
    one_of("kind", "usage", "overdraft", "top_up", "repayment"),
    CheckConstraint("debit_account_id <> credit_account_id", name="two_ends"),
    CheckConstraint(f"meter IN ({METERS_SQL})", name="meter"),
    CheckConstraint(f"quantity BETWEEN 1 AND {QUANTITY_MAX}", name="quantity"),
    CheckConstraint(f"rate_pico BETWEEN 0 AND {RATE_PICO_MAX}", name="rate"),
    # A metered row states what was counted and at which price; any other row states neither.
    CheckConstraint(
        "CASE WHEN kind = 'usage' THEN request_id IS NOT NULL AND meter IS NOT NULL"
        " AND quantity IS NOT NULL AND rate_pico IS NOT NULL AND price_card_id IS NOT NULL"
        " ELSE meter IS NULL AND quantity IS NULL AND rate_pico IS NULL"
        " AND price_card_id IS NULL END",
        name="metered",
    ),
    # Only a metered row may be worth nothing: one token at a rate below half a nano-dollar.
    CheckConstraint(
        "CASE WHEN kind = 'usage' THEN amount_nanos = (quantity * rate_pico + 500) / 1000"
        " ELSE amount_nanos > 0 END",
        name="amount",
    ),
    Index(None, "debit_account_id"),
    Index(None, "credit_account_id"),
)

kv_records = table(
    "kv_records",
    text("request_id", ForeignKey("requests.id"), primary_key=True),
    text("engine_boot_id"),
    text("finish_reason"),
    integer("prompt_tokens"),
    integer("tokens_reused_promised"),
    integer("tokens_reused_gift"),
    integer("tokens_read_recomputed"),
    integer("tokens_computed"),
    text("reads_by_tier"),
    integer("tokens_recomputed_preemption"),
    integer("num_preemptions"),
    text("grants"),
    integer("output_tokens"),
    integer("overrun_tokens"),
    integer("queued_ms"),
    not_negative(
        "tokens_reused_promised",
        "tokens_reused_gift",
        "tokens_read_recomputed",
        "tokens_computed",
        "tokens_recomputed_preemption",
        "num_preemptions",
        "output_tokens",
        "overrun_tokens",
        "queued_ms",
    ),
    CheckConstraint(
        "tokens_reused_promised + tokens_reused_gift + tokens_read_recomputed + tokens_computed"
        " = prompt_tokens",
        name="prompt",
    ),
)

# Totals of one lease so far. They never fall: the same totals for the same reason are one report.
lease_reports = table(
    "lease_reports",
    text("lease_id", primary_key=True),
    integer("idle_block_ms", primary_key=True),
    integer("contended_block_ms", primary_key=True),
    text("reason", primary_key=True),
    text("request_id", ForeignKey("holds.request_id")),
    text("entry_key", nullable=True),  # NULL: pinned for an entry that the request read
    integer("tokens"),
    text("tier"),
    integer("num_bytes"),
    integer("reported_at_ms"),
    one_of("reason", "refreshed", "expired", "unpinned", "lost", "dropped", "stopped"),
    not_negative("idle_block_ms", "contended_block_ms", "tokens", "num_bytes"),
    Index(None, "request_id"),
    Index(None, "reported_at_ms"),
)

outbox = table(
    "outbox",
    text("id", primary_key=True),
    text("topic"),
    text("payload"),
    integer("created_at_ms"),
    integer("sent_at_ms", nullable=True),
    Index(
        None,
        "created_at_ms",
        sqlite_where=condition("sent_at_ms IS NULL"),
        postgresql_where=condition("sent_at_ms IS NULL"),
    ),
)

# Append-only tables: triggers refuse to update, delete, replace or truncate their rows.
IMMUTABLE = (
    price_cards,
    price_rates,
    requests,
    transfers,
    kv_records,
    lease_reports,
    hold_decisions,
    server_secret,
)
