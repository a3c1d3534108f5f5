"""Recompute the books: every rule that the tables state once is checked against the rows.

Reads one snapshot, so requests may settle meanwhile. Each problem is one sentence that names a row.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, func, select

from billing import accounts as names
from billing.cache_split import writes_billed
from billing.columns import metadata
from billing.facts import GrantFact
from billing.holds import Hold, open_holds
from billing.ledger import Balance, trial_balance
from billing.meters import Meter, Quantities, WritePoint, split
from billing.money import amount_nanos
from billing.records import quantities_of
from billing.rows import from_json
from billing.tables import holds, kv_records, lease_reports, price_rates, requests, transfers


@dataclass(frozen=True, slots=True)
class Report:
    """What was found. An open hold is a request in progress, or one that waits for recovery."""

    problems: tuple[str, ...]
    row_counts: dict[str, int]
    open_holds: tuple[Hold, ...]

    @property
    def sound(self) -> bool:
        """Whether the books agree."""
        return not self.problems


def verify(conn: Connection) -> Report:
    """Compare accounts, transfers, requests, holds, prices and engine facts with each other."""
    balances = trial_balance(conn)
    problems = (
        *_account_problems(conn, balances),
        *_transfer_problems(conn),
        *_request_problems(conn),
        *_hold_problems(conn, balances),
        *_engine_problems(conn),
        *_lease_problems(conn),
    )
    return Report(problems, _row_counts(conn), tuple(open_holds(conn)))


def _account_problems(conn: Connection, balances: list[Balance]) -> Iterator[str]:
    """Stored totals are the transfers', debits equal credits, no prepaid account is below 0."""
    debits = _sums(conn, transfers.c.debit_account_id, transfers.c.amount_nanos)
    credits_ = _sums(conn, transfers.c.credit_account_id, transfers.c.amount_nanos)
    for account in balances:
        posted = (debits[account.account_id], credits_[account.account_id])
        if posted != (account.debits_nanos, account.credits_nanos):
            yield (
                f"Account {account.account_id} says debits {account.debits_nanos} and credits"
                f" {account.credits_nanos}, its transfers say {posted[0]} and {posted[1]}."
            )
        if account.account_id.startswith(f"{names.PREPAID}:") and account.credit_nanos < 0:
            yield f"Account {account.account_id} is below zero: {account.credit_nanos}."
    difference = sum(account.credit_nanos for account in balances)
    if difference != 0:
        yield f"The trial balance is not zero: {difference}."


def _transfer_problems(conn: Connection) -> Iterator[str]:
    """Each metered row is quantity x rate of its own card, from a payer of its request."""
    rates = {
        (row.price_card_id, row.meter): row.rate_pico for row in conn.execute(select(price_rates))
    }
    rows = conn.execute(
        select(
            transfers,
            requests.c.price_card_id.label("request_card_id"),
            holds.c.account_id.label("payer_id"),
        )
        .outerjoin(requests, requests.c.id == transfers.c.request_id)
        .outerjoin(holds, holds.c.request_id == transfers.c.request_id)
        .where(transfers.c.kind == "usage")
    )
    for row in rows:
        transfer = f"Transfer {row.tx_id}/{row.seq}"
        if row.amount_nanos != amount_nanos(quantity=row.quantity, rate_pico=row.rate_pico):
            yield f"{transfer} is not quantity x rate: {row.amount_nanos}."
        if rates.get((row.price_card_id, row.meter)) != row.rate_pico:
            yield f"{transfer} has a rate that its price card does not: {row.rate_pico}."
        if row.price_card_id != row.request_card_id:
            yield f"{transfer} has another price card than its request: {row.price_card_id}."
        if row.debit_account_id != row.payer_id:
            yield f"{transfer} is paid from another account than its hold: {row.debit_account_id}."
        if row.credit_account_id != names.revenue(Meter(row.meter)):
            yield f"{transfer} is earned on another meter's account: {row.credit_account_id}."


def _request_problems(conn: Connection) -> Iterator[str]:
    """Each request's quantities and charge are its transfers', and its prompt is billed whole."""
    posted: defaultdict[str, dict[str, int]] = defaultdict(dict)
    charged: defaultdict[str, int] = defaultdict(int)
    for row in conn.execute(select(transfers).where(transfers.c.kind == "usage")):
        posted[row.request_id][row.meter] = row.quantity
        charged[row.request_id] += row.amount_nanos
    for row in conn.execute(select(requests)):
        quantities = quantities_of(row)
        if Quantities(**posted[row.id]) != quantities:
            yield f"Request {row.id} has other quantities than its transfers."
        if charged[row.id] != row.charged_nanos:
            yield f"Request {row.id} was charged {row.charged_nanos}, posted {charged[row.id]}."
        nothing = quantities == Quantities()
        if not nothing and quantities.prompt != row.prompt_tokens:
            yield f"Request {row.id} bills {quantities.prompt} of {row.prompt_tokens} tokens."
        if nothing and row.status in ("completed", "aborted"):
            yield f"Request {row.id} is {row.status} and was charged nothing."


def _hold_problems(conn: Connection, balances: list[Balance]) -> Iterator[str]:
    """Pending sums are the open holds; a hold is closed exactly when its request is final."""
    query = select(holds.c.account_id, func.sum(holds.c.amount_nanos)).where(
        holds.c.state == "open"
    )
    reserved = {
        account: int(total) for account, total in conn.execute(query.group_by("account_id"))
    }
    for account in balances:
        held = reserved.get(account.account_id, 0)
        if held != account.pending_nanos:
            yield (
                f"Account {account.account_id} has {account.pending_nanos} pending,"
                f" its open holds reserve {held}."
            )
    rows = conn.execute(
        select(holds.c.request_id, holds.c.state, requests.c.id).outerjoin(
            requests, requests.c.id == holds.c.request_id
        )
    )
    for request_id, state, final_id in rows:
        if (state == "open") != (final_id is None):
            final = "a final" if final_id is not None else "no final"
            yield f"Hold {request_id} is {state} and has {final} request."


def _engine_problems(conn: Connection) -> Iterator[str]:
    """The engine's four facts add up to the prompt, and what is billed is what it proves."""
    rows = conn.execute(
        select(
            requests,
            kv_records.c.finish_reason,
            kv_records.c.tokens_reused_promised,
            kv_records.c.tokens_reused_gift,
            kv_records.c.tokens_read_recomputed,
            kv_records.c.tokens_computed,
            kv_records.c.grants,
            kv_records.c.output_tokens.label("produced_tokens"),
        ).outerjoin(kv_records, kv_records.c.request_id == requests.c.id)
    )
    for row in rows:
        if row.finish_reason is None:
            if row.charged_nanos != 0:
                yield f"Request {row.id} was charged without an engine record."
        else:
            yield from _fact_problems(row)


def _fact_problems(row: Row[Any]) -> Iterator[str]:
    read = row.tokens_reused_promised + row.tokens_read_recomputed
    writes = from_json(WritePoint, row.writes)
    accounted = read + row.tokens_reused_gift + row.tokens_computed
    if accounted != row.prompt_tokens:
        yield f"Request {row.id} has engine facts for {accounted} of {row.prompt_tokens} tokens."
    if quantities_of(row) == Quantities():
        return
    if row.cache_read_tokens != read:
        yield f"Request {row.id} bills {row.cache_read_tokens} read, the engine says {read}."
    pinned = writes_billed(from_json(GrantFact, row.grants), moment="settlement")
    for write in writes:
        if write.tokens not in pinned:
            yield (
                f"Request {row.id} bills a write of {write.tokens} tokens"
                " that the engine did not pin."
            )
    if quantities_of(row) != split(
        total_tokens=row.prompt_tokens,
        read_tokens=row.cache_read_tokens,
        writes=writes,
        output_tokens=row.output_tokens,
    ):
        yield (f"Request {row.id} bills other cache tokens than its read and its writes come to.")
    if row.output_tokens != row.produced_tokens:
        yield (
            f"Request {row.id} bills {row.output_tokens} output tokens,"
            f" the engine says {row.produced_tokens}."
        )


def _lease_problems(conn: Connection) -> Iterator[str]:
    """The reports of one lease are of one breakpoint, and neither of its two totals ever falls."""
    earlier: Row[Any] | None = None
    rows = conn.execute(
        select(lease_reports, holds.c.writes)
        .join(holds, holds.c.request_id == lease_reports.c.request_id)
        .order_by(
            lease_reports.c.lease_id,
            lease_reports.c.idle_block_ms,
            lease_reports.c.contended_block_ms,
        )
    )
    for row in rows:
        keys = {write.tokens: write.entry_key for write in from_json(WritePoint, row.writes)}
        if row.entry_key != keys.get(row.tokens):
            yield f"Lease {row.lease_id} is of another entry than its request wrote."
        if earlier is not None and earlier.lease_id == row.lease_id:
            if (earlier.request_id, earlier.tokens) != (row.request_id, row.tokens):
                yield f"Lease {row.lease_id} is reported for two breakpoints."
            if earlier.contended_block_ms > row.contended_block_ms:
                yield f"Lease {row.lease_id} has a contended total that fell."
        earlier = row


def _sums(conn: Connection, key: Any, value: Any) -> defaultdict[str, int]:
    sums: defaultdict[str, int] = defaultdict(int)
    for account_id, total in conn.execute(select(key, func.sum(value)).group_by(key)):
        sums[account_id] = int(total)
    return sums


def _row_counts(conn: Connection) -> dict[str, int]:
    return {
        table.name: conn.scalar(select(func.count()).select_from(table)) or 0
        for table in metadata.sorted_tables
    }
