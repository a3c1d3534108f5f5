"""The ledger: customers, price cards, accounts, holds, requests, transfers, cache entries, outbox.

Revision 0001, after nothing. Spelled out in SQL and frozen: later changes are later migrations. The
text is PostgreSQL's; SQLite reads it with INTEGER for BIGINT (64 bits there) and STRICT tables.
"""

from alembic import op

from migrations.immutable import make_immutable

revision = "0001"
down_revision = None

TABLES = (
    """
    CREATE TABLE organizations (
        id TEXT NOT NULL,
        name TEXT NOT NULL,
        mode TEXT NOT NULL,
        created_at_ms BIGINT NOT NULL,
        CONSTRAINT pk_organizations PRIMARY KEY (id),
        CONSTRAINT ck_organizations_mode CHECK (mode IN ('postpaid', 'prepaid'))
    )
    """,
    """
    CREATE TABLE outbox (
        id TEXT NOT NULL,
        topic TEXT NOT NULL,
        payload TEXT NOT NULL,
        created_at_ms BIGINT NOT NULL,
        sent_at_ms BIGINT,
        CONSTRAINT pk_outbox PRIMARY KEY (id)
    )
    """,
    """
    CREATE TABLE price_cards (
        id TEXT NOT NULL,
        model_id TEXT NOT NULL,
        version BIGINT NOT NULL,
        effective_from_ms BIGINT NOT NULL,
        published_at_ms BIGINT NOT NULL,
        content_hash TEXT NOT NULL,
        CONSTRAINT pk_price_cards PRIMARY KEY (id),
        CONSTRAINT uq_price_cards_model_id_version UNIQUE (model_id, version)
    )
    """,
    """
    CREATE TABLE accounts (
        id TEXT NOT NULL,
        organization_id TEXT,
        debits_posted_nanos BIGINT NOT NULL,
        credits_posted_nanos BIGINT NOT NULL,
        debits_pending_nanos BIGINT NOT NULL,
        CONSTRAINT pk_accounts PRIMARY KEY (id),
        CONSTRAINT ck_accounts_not_negative CHECK (debits_posted_nanos >= 0 AND
            credits_posted_nanos >= 0 AND debits_pending_nanos >= 0),
        CONSTRAINT fk_accounts_organization_id FOREIGN KEY(organization_id) REFERENCES
            organizations (id)
    )
    """,
    """
    CREATE TABLE price_rates (
        price_card_id TEXT NOT NULL,
        meter TEXT NOT NULL,
        rate_pico BIGINT NOT NULL,
        CONSTRAINT pk_price_rates PRIMARY KEY (price_card_id, meter),
        CONSTRAINT ck_price_rates_meter CHECK (meter IN ('input', 'cache_read', 'cache_write_5m',
            'cache_write_1h', 'output')),
        CONSTRAINT ck_price_rates_rate CHECK (rate_pico BETWEEN 0 AND 2147483647),
        CONSTRAINT fk_price_rates_price_card_id FOREIGN KEY(price_card_id) REFERENCES price_cards
            (id)
    )
    """,
    """
    CREATE TABLE workspaces (
        id TEXT NOT NULL,
        organization_id TEXT NOT NULL,
        name TEXT NOT NULL,
        created_at_ms BIGINT NOT NULL,
        CONSTRAINT pk_workspaces PRIMARY KEY (id),
        CONSTRAINT uq_workspaces_id_organization_id UNIQUE (id, organization_id),
        CONSTRAINT fk_workspaces_organization_id FOREIGN KEY(organization_id) REFERENCES
            organizations (id)
    )
    """,
    """
    CREATE TABLE api_keys (
        id TEXT NOT NULL,
        organization_id TEXT NOT NULL,
        workspace_id TEXT,
        name TEXT NOT NULL,
        kind TEXT NOT NULL,
        secret_hash TEXT NOT NULL,
        secret_prefix TEXT NOT NULL,
        created_at_ms BIGINT NOT NULL,
        revoked_at_ms BIGINT,
        CONSTRAINT pk_api_keys PRIMARY KEY (id),
        CONSTRAINT fk_api_keys_workspace_id_organization_id FOREIGN KEY(workspace_id,
            organization_id) REFERENCES workspaces (id, organization_id),
        CONSTRAINT uq_api_keys_secret_hash UNIQUE (secret_hash),
        CONSTRAINT ck_api_keys_kind CHECK (kind IN ('customer', 'admin')),
        CONSTRAINT ck_api_keys_workspace CHECK ((kind = 'customer') = (workspace_id IS NOT NULL)),
        CONSTRAINT fk_api_keys_organization_id FOREIGN KEY(organization_id) REFERENCES
            organizations (id)
    )
    """,
    """
    CREATE TABLE holds (
        request_id TEXT NOT NULL,
        organization_id TEXT NOT NULL,
        workspace_id TEXT NOT NULL,
        key_id TEXT NOT NULL,
        account_id TEXT NOT NULL,
        requested_model TEXT NOT NULL,
        model_id TEXT NOT NULL,
        price_card_id TEXT NOT NULL,
        total_tokens BIGINT NOT NULL,
        read_tokens BIGINT NOT NULL,
        max_tokens BIGINT NOT NULL,
        writes TEXT NOT NULL,
        stream BIGINT NOT NULL,
        amount_nanos BIGINT NOT NULL,
        owner_boot_id TEXT NOT NULL,
        state TEXT NOT NULL,
        started_at_ms BIGINT NOT NULL,
        closed_at_ms BIGINT,
        CONSTRAINT pk_holds PRIMARY KEY (request_id),
        CONSTRAINT ck_holds_state CHECK (state IN ('open', 'settled', 'released')),
        CONSTRAINT ck_holds_closed CHECK ((state = 'open') = (closed_at_ms IS NULL)),
        CONSTRAINT ck_holds_stream CHECK (stream IN (0, 1)),
        CONSTRAINT ck_holds_read_tokens CHECK (read_tokens BETWEEN 0 AND total_tokens),
        CONSTRAINT ck_holds_not_negative CHECK (max_tokens >= 0 AND amount_nanos >= 0),
        CONSTRAINT fk_holds_organization_id FOREIGN KEY(organization_id) REFERENCES organizations
            (id),
        CONSTRAINT fk_holds_workspace_id FOREIGN KEY(workspace_id) REFERENCES workspaces (id),
        CONSTRAINT fk_holds_key_id FOREIGN KEY(key_id) REFERENCES api_keys (id),
        CONSTRAINT fk_holds_account_id FOREIGN KEY(account_id) REFERENCES accounts (id),
        CONSTRAINT fk_holds_price_card_id FOREIGN KEY(price_card_id) REFERENCES price_cards (id)
    )
    """,
    """
    CREATE TABLE cache_entries (
        entry_key TEXT NOT NULL,
        request_id TEXT NOT NULL,
        tokens BIGINT NOT NULL,
        ttl_class TEXT NOT NULL,
        ttl_ms BIGINT NOT NULL,
        state TEXT NOT NULL,
        expires_at_ms BIGINT NOT NULL,
        CONSTRAINT pk_cache_entries PRIMARY KEY (entry_key, request_id),
        CONSTRAINT ck_cache_entries_ttl_class CHECK (ttl_class IN ('5m', '1h')),
        CONSTRAINT ck_cache_entries_state CHECK (state IN ('pending', 'live')),
        CONSTRAINT ck_cache_entries_positive CHECK (tokens > 0 AND ttl_ms > 0),
        CONSTRAINT fk_cache_entries_request_id FOREIGN KEY(request_id) REFERENCES holds (request_id)
    )
    """,
    """
    CREATE TABLE requests (
        id TEXT NOT NULL,
        organization_id TEXT NOT NULL,
        workspace_id TEXT NOT NULL,
        key_id TEXT NOT NULL,
        requested_model TEXT NOT NULL,
        model_id TEXT NOT NULL,
        price_card_id TEXT NOT NULL,
        stream BIGINT NOT NULL,
        status TEXT NOT NULL,
        stop_reason TEXT,
        error_type TEXT,
        release_reason TEXT,
        started_at_ms BIGINT NOT NULL,
        first_token_at_ms BIGINT,
        ended_at_ms BIGINT NOT NULL,
        prompt_tokens BIGINT NOT NULL,
        input_tokens BIGINT NOT NULL,
        cache_read_tokens BIGINT NOT NULL,
        cache_write_5m_tokens BIGINT NOT NULL,
        cache_write_1h_tokens BIGINT NOT NULL,
        output_tokens BIGINT NOT NULL,
        charged_nanos BIGINT NOT NULL,
        writes TEXT NOT NULL,
        refused TEXT NOT NULL,
        CONSTRAINT pk_requests PRIMARY KEY (id),
        CONSTRAINT ck_requests_status CHECK (status IN ('completed', 'aborted', 'failed',
            'released')),
        CONSTRAINT ck_requests_release_reason CHECK ((status = 'released') = (release_reason IS NOT
            NULL)),
        CONSTRAINT ck_requests_stream CHECK (stream IN (0, 1)),
        CONSTRAINT ck_requests_not_negative CHECK (input_tokens >= 0 AND cache_read_tokens >= 0 AND
            cache_write_5m_tokens >= 0 AND cache_write_1h_tokens >= 0 AND output_tokens >= 0 AND
            charged_nanos >= 0),
        CONSTRAINT ck_requests_prompt CHECK (input_tokens + cache_read_tokens +
            cache_write_5m_tokens + cache_write_1h_tokens IN (0, prompt_tokens)),
        CONSTRAINT fk_requests_id FOREIGN KEY(id) REFERENCES holds (request_id),
        CONSTRAINT fk_requests_organization_id FOREIGN KEY(organization_id) REFERENCES
            organizations (id),
        CONSTRAINT fk_requests_workspace_id FOREIGN KEY(workspace_id) REFERENCES workspaces (id),
        CONSTRAINT fk_requests_key_id FOREIGN KEY(key_id) REFERENCES api_keys (id),
        CONSTRAINT fk_requests_price_card_id FOREIGN KEY(price_card_id) REFERENCES price_cards (id)
    )
    """,
    """
    CREATE TABLE kv_records (
        request_id TEXT NOT NULL,
        engine_boot_id TEXT NOT NULL,
        finish_reason TEXT NOT NULL,
        prompt_tokens BIGINT NOT NULL,
        tokens_reused_promised BIGINT NOT NULL,
        tokens_reused_gift BIGINT NOT NULL,
        tokens_read_recomputed BIGINT NOT NULL,
        tokens_computed BIGINT NOT NULL,
        reads_by_tier TEXT NOT NULL,
        tokens_recomputed_preemption BIGINT NOT NULL,
        num_preemptions BIGINT NOT NULL,
        grants TEXT NOT NULL,
        output_tokens BIGINT NOT NULL,
        overrun_tokens BIGINT NOT NULL,
        queued_ms BIGINT NOT NULL,
        CONSTRAINT pk_kv_records PRIMARY KEY (request_id),
        CONSTRAINT ck_kv_records_not_negative CHECK (tokens_reused_promised >= 0 AND
            tokens_reused_gift >= 0 AND tokens_read_recomputed >= 0 AND tokens_computed >= 0 AND
            tokens_recomputed_preemption >= 0 AND num_preemptions >= 0 AND output_tokens >= 0 AND
            overrun_tokens >= 0 AND queued_ms >= 0),
        CONSTRAINT ck_kv_records_prompt CHECK (tokens_reused_promised + tokens_reused_gift +
            tokens_read_recomputed + tokens_computed = prompt_tokens),
        CONSTRAINT fk_kv_records_request_id FOREIGN KEY(request_id) REFERENCES requests (id)
    )
    """,
    """
    CREATE TABLE transfers (
        tx_id TEXT NOT NULL,
        seq BIGINT NOT NULL,
        kind TEXT NOT NULL,
        debit_account_id TEXT NOT NULL,
        credit_account_id TEXT NOT NULL,
        amount_nanos BIGINT NOT NULL,
        meter TEXT,
        quantity BIGINT,
        rate_pico BIGINT,
        price_card_id TEXT,
        request_id TEXT,
        effective_at_ms BIGINT NOT NULL,
        booked_at_ms BIGINT NOT NULL,
        CONSTRAINT pk_transfers PRIMARY KEY (tx_id, seq),
        CONSTRAINT uq_transfers_request_id_meter_kind UNIQUE (request_id, meter, kind),
        CONSTRAINT ck_transfers_kind CHECK (kind IN ('usage', 'overdraft', 'top_up', 'repayment')),
        CONSTRAINT ck_transfers_two_ends CHECK (debit_account_id <> credit_account_id),
        CONSTRAINT ck_transfers_meter CHECK (meter IN ('input', 'cache_read', 'cache_write_5m',
            'cache_write_1h', 'output')),
        CONSTRAINT ck_transfers_quantity CHECK (quantity BETWEEN 1 AND 2147483647),
        CONSTRAINT ck_transfers_rate CHECK (rate_pico BETWEEN 0 AND 2147483647),
        CONSTRAINT ck_transfers_metered CHECK (CASE WHEN kind = 'usage' THEN request_id IS NOT NULL
            AND meter IS NOT NULL AND quantity IS NOT NULL AND rate_pico IS NOT NULL AND
            price_card_id IS NOT NULL ELSE meter IS NULL AND quantity IS NULL AND rate_pico IS NULL
            AND price_card_id IS NULL END),
        CONSTRAINT ck_transfers_amount CHECK (CASE WHEN kind = 'usage' THEN amount_nanos =
            (quantity * rate_pico + 500) / 1000 ELSE amount_nanos > 0 END),
        CONSTRAINT fk_transfers_debit_account_id FOREIGN KEY(debit_account_id) REFERENCES accounts
            (id),
        CONSTRAINT fk_transfers_credit_account_id FOREIGN KEY(credit_account_id) REFERENCES
            accounts (id),
        CONSTRAINT fk_transfers_price_card_id FOREIGN KEY(price_card_id) REFERENCES price_cards
            (id),
        CONSTRAINT fk_transfers_request_id FOREIGN KEY(request_id) REFERENCES requests (id)
    )
    """,
)

INDEXES = (
    "CREATE INDEX ix_outbox_created_at_ms ON outbox (created_at_ms) WHERE sent_at_ms IS NULL",
    "CREATE INDEX ix_holds_started_at_ms ON holds (started_at_ms) WHERE state = 'open'",
    "CREATE INDEX ix_cache_entries_expires_at_ms ON cache_entries (expires_at_ms)",
    "CREATE INDEX ix_cache_entries_request_id ON cache_entries (request_id)",
    "CREATE INDEX ix_requests_organization_id_ended_at_ms"
    " ON requests (organization_id, ended_at_ms)",
    "CREATE INDEX ix_transfers_credit_account_id ON transfers (credit_account_id)",
    "CREATE INDEX ix_transfers_debit_account_id ON transfers (debit_account_id)",
)

# Facts: the triggers refuse any change. Beside each table, its unique keys.
IMMUTABLE = {
    "price_cards": (("id",), ("model_id", "version")),
    "price_rates": (("price_card_id", "meter"),),
    "requests": (("id",),),
    "transfers": (("tx_id", "seq"), ("request_id", "meter", "kind")),
    "kv_records": (("request_id",),),
}


def upgrade() -> None:
    """Create every table, its indexes and its triggers."""
    sqlite = op.get_bind().dialect.name == "sqlite"
    for table in TABLES:
        op.execute(table.replace("BIGINT", "INTEGER") + "STRICT" if sqlite else table)
    for index in INDEXES:
        op.execute(index)
    for name, unique_keys in IMMUTABLE.items():
        make_immutable(name, unique_keys=unique_keys)
