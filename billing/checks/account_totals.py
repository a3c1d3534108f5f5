"""Accounts: every one is there, says what its transfers say, and fits its organisation."""

from collections.abc import Iterator
from typing import Any

from sqlalchemy import Connection, Row, exists, func, literal, select

from billing import accounts as names
from billing.ledger import balance_of
from billing.scan import as_int, scan, sums_by
from billing.tables import accounts, holds, organizations, transfers


def account_problems(conn: Connection) -> Iterator[str]:
    """Stored totals are the transfers', debits equal credits, no prepaid account is below 0."""
    debits = sums_by(transfers.c.debit_account_id, transfers.c.amount_nanos)
    credits_ = sums_by(transfers.c.credit_account_id, transfers.c.amount_nanos)
    reserved = sums_by(holds.c.account_id, holds.c.amount_nanos, holds.c.state == "open")
    rows = scan(
        conn,
        select(
            accounts,
            organizations.c.mode,
            debits.c.total.label("debits"),
            credits_.c.total.label("credits"),
            reserved.c.total.label("reserved"),
        )
        .outerjoin(debits, debits.c.key == accounts.c.id)
        .outerjoin(credits_, credits_.c.key == accounts.c.id)
        .outerjoin(reserved, reserved.c.key == accounts.c.id)
        .outerjoin(organizations, organizations.c.id == accounts.c.organization_id)
        .order_by(accounts.c.id),
    )
    difference = 0
    for row in rows:
        yield from _totals_problems(row)
        yield from _owner_problems(row)
        difference += balance_of(row).credit_nanos
    if difference != 0:
        yield f"The trial balance is not zero: {difference}."


def missing_account_problems(conn: Connection) -> Iterator[str]:
    """Each organisation has its three accounts, and we have ours."""
    for code in (names.PREPAID, names.UNBILLED, names.OVERDRAFT):
        expected_id = literal(f"{code}:") + organizations.c.id
        without = select(expected_id.label("account_id")).where(
            ~exists().where(accounts.c.id == expected_id)
        )
        for row in scan(conn, without):
            yield f"Account {row.account_id} is missing."
    if conn.scalar(select(func.count()).select_from(organizations)):
        ours = select(accounts.c.id).where(accounts.c.id.in_(names.OUR_ACCOUNTS))
        present = set(conn.scalars(ours))
        yield from (
            f"Account {id_} is missing." for id_ in names.OUR_ACCOUNTS if id_ not in present
        )


def payer_problems(conn: Connection) -> Iterator[str]:
    """The holds of an organisation reserve on the one account that it pays from."""
    payers = (
        select(
            holds.c.organization_id,
            organizations.c.mode,
            holds.c.account_id,
            func.count().label("num_holds"),
        )
        .join(organizations, organizations.c.id == holds.c.organization_id)
        .group_by(holds.c.organization_id, organizations.c.mode, holds.c.account_id)
        .order_by(holds.c.organization_id)
    )
    for row in scan(conn, payers):
        payer = names.prepaid if row.mode == "prepaid" else names.unbilled
        if row.account_id != payer(row.organization_id):
            yield (
                f"Organization {row.organization_id} is {row.mode}, and {row.num_holds} of its"
                f" holds are of another account: {row.account_id}."
            )


def _totals_problems(row: Row[Any]) -> Iterator[str]:
    account = balance_of(row)
    posted = (as_int(row.debits), as_int(row.credits))
    if posted != (account.debits_nanos, account.credits_nanos):
        yield (
            f"Account {account.account_id} says debits {account.debits_nanos} and credits"
            f" {account.credits_nanos}, its transfers say {posted[0]} and {posted[1]}."
        )
    if account.account_id.startswith(f"{names.PREPAID}:") and account.credit_nanos < 0:
        yield f"Account {account.account_id} is below zero: {account.credit_nanos}."
    if as_int(row.reserved) != account.pending_nanos:
        yield (
            f"Account {account.account_id} has {account.pending_nanos} pending,"
            f" its open holds reserve {as_int(row.reserved)}."
        )


def _owner_problems(row: Row[Any]) -> Iterator[str]:
    """An account belongs to the organisation in its id; only the kind that it pays from is used."""
    if row.organization_id is None:
        if row.id not in names.OUR_ACCOUNTS:
            yield f"Account {row.id} is nobody's."
        return
    if row.id not in names.of_organization(row.organization_id):
        yield f"Account {row.id} is of another organization: {row.organization_id}."
    unused = {
        "prepaid": (names.unbilled(row.organization_id),),
        "postpaid": (names.prepaid(row.organization_id), names.overdraft(row.organization_id)),
    }
    if row.id in unused.get(row.mode, ()) and (row.debits_posted_nanos or row.credits_posted_nanos):
        yield f"Account {row.id} is in use, and its organization is {row.mode}."
