"""Verification: recompute the books from every row, and report what does not agree.

Reads one snapshot, so requests may settle meanwhile. Each problem is one sentence that names a row.

Memory: `scan.ROWS_AT_ONCE` rows, whatever the size of the tables, and the result: one sentence a
problem, and the open holds. The database does the joins and sums, and sorts on its own disk.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, Subquery, and_, case, func, or_, select

from billing import accounts as names
from billing.cache_split import writes_billed
from billing.columns import metadata
from billing.facts import GrantFact
from billing.holds import Hold, open_holds
from billing.ledger import balance_of
from billing.meters import Meter, Quantities, WritePoint, split
from billing.money import amount_nanos
from billing.records import quantities_of
from billing.rows import from_json
from billing.scan import as_int, scan, sums_by
from billing.tables import (
    accounts,
    holds,
    kv_records,
    lease_reports,
    price_rates,
    requests,
    transfers,
)


@dataclass(frozen=True, slots=True)
class Verification:
    """What was found. An open hold is a request in progress, or one that recovery will close."""

    problems: tuple[str, ...]
    row_counts: dict[str, int]
    open_holds: tuple[Hold, ...]

    @property
    def sound(self) -> bool:
        """Whether no problem was found."""
        return not self.problems


def verify(conn: Connection) -> Verification:
    """Compare accounts, transfers, requests, holds, prices and engine facts with each other."""
    problems = (
        *_account_problems(conn),
        *_transfer_problems(conn),
        *_request_problems(conn),
        *_hold_problems(conn),
        *_engine_problems(conn),
        *_lease_problems(conn),
    )
    return Verification(problems, _row_counts(conn), tuple(open_holds(conn)))


def _account_problems(conn: Connection) -> Iterator[str]:
    """Stored totals are the transfers', debits equal credits, no prepaid account is below 0."""
    debits = sums_by(transfers.c.debit_account_id, transfers.c.amount_nanos)
    credits_ = sums_by(transfers.c.credit_account_id, transfers.c.amount_nanos)
    rows = scan(
        conn,
        select(accounts, debits.c.total.label("debits"), credits_.c.total.label("credits"))
        .outerjoin(debits, debits.c.key == accounts.c.id)
        .outerjoin(credits_, credits_.c.key == accounts.c.id)
        .order_by(accounts.c.id),
    )
    difference = 0
    for row in rows:
        account = balance_of(row)
        posted = (as_int(row.debits), as_int(row.credits))
        if posted != (account.debits_nanos, account.credits_nanos):
            yield (
                f"Account {account.account_id} says debits {account.debits_nanos} and credits"
                f" {account.credits_nanos}, its transfers say {posted[0]} and {posted[1]}."
            )
        if account.account_id.startswith(f"{names.PREPAID}:") and account.credit_nanos < 0:
            yield f"Account {account.account_id} is below zero: {account.credit_nanos}."
        difference += account.credit_nanos
    if difference != 0:
        yield f"The trial balance is not zero: {difference}."


def _transfer_problems(conn: Connection) -> Iterator[str]:
    """Each metered row is quantity x rate of its own card, from a payer of its request."""
    own_rate = and_(
        price_rates.c.price_card_id == transfers.c.price_card_id,
        price_rates.c.meter == transfers.c.meter,
    )
    rows = scan(
        conn,
        select(
            transfers,
            price_rates.c.rate_pico.label("card_rate_pico"),
            requests.c.price_card_id.label("request_card_id"),
            holds.c.account_id.label("payer_id"),
        )
        .outerjoin(price_rates, own_rate)
        .outerjoin(requests, requests.c.id == transfers.c.request_id)
        .outerjoin(holds, holds.c.request_id == transfers.c.request_id)
        .where(transfers.c.kind == "usage"),
    )
    for row in rows:
        transfer = f"Transfer {row.tx_id}/{row.seq}"
        if row.amount_nanos != amount_nanos(quantity=row.quantity, rate_pico=row.rate_pico):
            yield f"{transfer} is not quantity x rate: {row.amount_nanos}."
        if row.card_rate_pico != row.rate_pico:
            yield f"{transfer} has a rate that its price card does not: {row.rate_pico}."
        if row.price_card_id != row.request_card_id:
            yield f"{transfer} has another price card than its request: {row.price_card_id}."
        if row.debit_account_id != row.payer_id:
            yield f"{transfer} is paid from another account than its hold: {row.debit_account_id}."
        if row.credit_account_id != names.revenue(Meter(row.meter)):
            yield f"{transfer} is earned on another meter's account: {row.credit_account_id}."


def _request_problems(conn: Connection) -> Iterator[str]:
    """Each request's quantities and charge are its transfers', and its prompt is billed whole."""
    posted = _posted()
    rows = scan(
        conn, select(requests, posted).outerjoin(posted, posted.c.request_id == requests.c.id)
    )
    for row in rows:
        quantities = quantities_of(row)
        if quantities != Quantities(
            **{m.value: as_int(getattr(row, f"posted_{m}")) for m in Meter}
        ):
            yield f"Request {row.id} has other quantities than its transfers."
        if row.charged_nanos != as_int(row.posted_nanos):
            yield (
                f"Request {row.id} was charged {row.charged_nanos},"
                f" posted {as_int(row.posted_nanos)}."
            )
        nothing = quantities == Quantities()
        if not nothing and quantities.prompt != row.prompt_tokens:
            yield f"Request {row.id} bills {quantities.prompt} of {row.prompt_tokens} tokens."
        if nothing and row.status in ("completed", "aborted"):
            yield f"Request {row.id} is {row.status} and was charged nothing."


def _posted() -> Subquery:
    """Return a subquery with a row for each charged request: quantity by meter, and the charge."""
    quantities = [
        func.sum(case((transfers.c.meter == meter.value, transfers.c.quantity), else_=0)).label(
            f"posted_{meter}"
        )
        for meter in Meter
    ]
    return (
        select(
            transfers.c.request_id,
            *quantities,
            func.sum(transfers.c.amount_nanos).label("posted_nanos"),
        )
        .where(transfers.c.kind == "usage")
        .group_by(transfers.c.request_id)
        .subquery()
    )


def _hold_problems(conn: Connection) -> Iterator[str]:
    """Pending sums are the open holds; a hold is closed exactly when its request is final."""
    is_open = holds.c.state == "open"
    reserved = sums_by(holds.c.account_id, holds.c.amount_nanos, is_open)
    rows = scan(
        conn,
        select(accounts, reserved.c.total.label("reserved"))
        .outerjoin(reserved, reserved.c.key == accounts.c.id)
        .order_by(accounts.c.id),
    )
    for row in rows:
        if as_int(row.reserved) != row.debits_pending_nanos:
            yield (
                f"Account {row.id} has {row.debits_pending_nanos} pending,"
                f" its open holds reserve {as_int(row.reserved)}."
            )
    is_final = requests.c.id.is_not(None)
    rows = scan(
        conn,
        select(holds.c.request_id, holds.c.state, is_final.label("is_final"))
        .outerjoin(requests, requests.c.id == holds.c.request_id)
        .where(or_(and_(is_open, is_final), and_(~is_open, ~is_final))),
    )
    for row in rows:
        final = "a final" if row.is_final else "no final"
        yield f"Hold {row.request_id} is {row.state} and has {final} request."


def _engine_problems(conn: Connection) -> Iterator[str]:
    """The engine's four facts add up to the prompt, and what is billed is what it proves."""
    rows = scan(
        conn,
        select(
            requests,
            kv_records.c.finish_reason,
            kv_records.c.tokens_reused_promised,
            kv_records.c.tokens_reused_gift,
            kv_records.c.tokens_read_recomputed,
            kv_records.c.tokens_computed,
            kv_records.c.grants,
            kv_records.c.output_tokens.label("produced_tokens"),
        ).outerjoin(kv_records, kv_records.c.request_id == requests.c.id),
    )
    for row in rows:
        if row.finish_reason is None:
            if row.charged_nanos != 0:
                yield f"Request {row.id} was charged without an engine record."
        else:
            yield from _fact_problems(row)


def _fact_problems(row: Row[Any]) -> Iterator[str]:
    read = row.tokens_reused_promised + row.tokens_read_recomputed
    writes = from_json(WritePoint, row.writes, column="writes")
    accounted = read + row.tokens_reused_gift + row.tokens_computed
    if accounted != row.prompt_tokens:
        yield f"Request {row.id} has engine facts for {accounted} of {row.prompt_tokens} tokens."
    if quantities_of(row) == Quantities():
        return
    if row.cache_read_tokens != read:
        yield f"Request {row.id} bills {row.cache_read_tokens} read, the engine says {read}."
    pinned = writes_billed(from_json(GrantFact, row.grants, column="grants"), moment="settlement")
    for write in writes:
        if write.num_tokens not in pinned:
            yield (
                f"Request {row.id} bills a write of {write.num_tokens} tokens"
                " that the engine did not pin."
            )
    if quantities_of(row) != split(
        total_tokens=row.prompt_tokens,
        read_tokens=row.cache_read_tokens,
        writes=writes,
        output_tokens=row.output_tokens,
    ):
        yield f"Request {row.id} bills other cache tokens than its read and its writes come to."
    if row.output_tokens != row.produced_tokens:
        yield (
            f"Request {row.id} bills {row.output_tokens} output tokens,"
            f" the engine says {row.produced_tokens}."
        )


def _lease_problems(conn: Connection) -> Iterator[str]:
    """The reports of one lease are of one breakpoint, and neither of its two totals ever falls."""
    earlier: Row[Any] | None = None
    rows = scan(
        conn,
        select(lease_reports, holds.c.writes)
        .join(holds, holds.c.request_id == lease_reports.c.request_id)
        .order_by(
            lease_reports.c.lease_id,
            lease_reports.c.idle_block_ms,
            lease_reports.c.contended_block_ms,
        ),
    )
    for row in rows:
        keys = {
            write.num_tokens: write.entry_key
            for write in from_json(WritePoint, row.writes, column="writes")
        }
        if row.entry_key != keys.get(row.tokens):
            yield f"Lease {row.lease_id} is of another entry than its request wrote."
        if earlier is not None and earlier.lease_id == row.lease_id:
            if (earlier.request_id, earlier.tokens) != (row.request_id, row.tokens):
                yield f"Lease {row.lease_id} is reported for two breakpoints."
            if earlier.contended_block_ms > row.contended_block_ms:
                yield f"Lease {row.lease_id} has a contended total that fell."
        earlier = row


def _row_counts(conn: Connection) -> dict[str, int]:
    return {
        table.name: conn.scalar(select(func.count()).select_from(table)) or 0
        for table in metadata.sorted_tables
    }
