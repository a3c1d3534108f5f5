"""Verification: recompute the books from every row, and report what does not agree.

Reads one snapshot, so requests may settle meanwhile. Each problem is one sentence that names a row.
What cannot be read is a problem too, and the other checks go on. `billing/checks/` has them.

Memory: `scan.ROWS_AT_ONCE` rows, whatever the size of the tables, and the result: one sentence a
problem, and the open holds. The database does the joins and sums, and sorts on its own disk.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from sqlalchemy import Connection, Table, func, select
from sqlalchemy.exc import DBAPIError

from billing.checks.account_totals import account_problems, missing_account_problems, payer_problems
from billing.checks.cache_entries import entry_problems
from billing.checks.card_contents import price_card_problems
from billing.checks.hold_states import decision_problems, hold_problems
from billing.checks.integrity import (
    file_problems,
    reference_problems,
    rule_problems,
    schema_problems,
)
from billing.checks.lease_totals import lease_problems
from billing.checks.outbox_rows import outbox_problems
from billing.checks.requests import engine_problems, request_problems, term_problems
from billing.checks.transfers import booking_problems, repayment_problems, transfer_problems
from billing.columns import metadata
from billing.holds import OpenHold, open_holds

T = TypeVar("T")

CHECKS: dict[str, Callable[[Connection], Iterator[str]]] = {
    "database file": file_problems,
    "schema": schema_problems,
    "references": reference_problems,
    "rules": rule_problems,
    "accounts": account_problems,
    "missing accounts": missing_account_problems,
    "payers": payer_problems,
    "transfers": transfer_problems,
    "repayments": repayment_problems,
    "bookings": booking_problems,
    "requests": request_problems,
    "terms": term_problems,
    "engine records": engine_problems,
    "holds": hold_problems,
    "decisions": decision_problems,
    "price cards": price_card_problems,
    "cache entries": entry_problems,
    "outbox": outbox_problems,
    "leases": lease_problems,
}


@dataclass(frozen=True, slots=True)
class Verification:
    """What was found. An open hold is a request in progress, or one that recovery will close."""

    problems: tuple[str, ...]
    row_counts: dict[str, int]
    open_holds: tuple[OpenHold, ...]

    @property
    def sound(self) -> bool:
        """Whether no problem was found."""
        return not self.problems


def verify(conn: Connection) -> Verification:
    """Compare everything in the books with everything that must agree with it.

    Never raises for what is stored: a table that the database cannot read is named.
    """
    problems: list[str] = []
    for subject, check in CHECKS.items():
        problems.extend(_finished(conn, subject, check))
    still_open = _read(conn, open_holds)
    return Verification(tuple(problems), _row_counts(conn), tuple(still_open or ()))


def _finished(
    conn: Connection, subject: str, check: Callable[[Connection], Iterator[str]]
) -> Iterator[str]:
    """Run one check in a savepoint; what stops it is its last problem, and stops no other check."""
    savepoint = conn.begin_nested()
    try:
        yield from check(conn)
        savepoint.commit()
    except DBAPIError as error:
        savepoint.rollback()
        problem = str(error.orig).strip().partition("\n")[0]
        yield f"The check of {subject} could not be finished: {problem}."


def _row_counts(conn: Connection) -> dict[str, int]:
    """Return the number of rows by table, without the tables that cannot be read."""
    counts = {}
    for table in metadata.sorted_tables:
        num_rows = _read(conn, partial(_count, table=table))
        if num_rows is not None:
            counts[table.name] = num_rows
    return counts


def _count(conn: Connection, *, table: Table) -> int:
    return conn.scalar(select(func.count()).select_from(table)) or 0


def _read(conn: Connection, query: Callable[[Connection], T]) -> T | None:
    """Return what a query returns; None where a check has named what is damaged."""
    savepoint = conn.begin_nested()
    try:
        found = query(conn)
    except DBAPIError:
        savepoint.rollback()
        return None
    savepoint.commit()
    return found
