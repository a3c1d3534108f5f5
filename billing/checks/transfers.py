"""Transfers: each moves what its request and card say, between the accounts of its kind."""

from collections.abc import Iterator
from typing import Any

from sqlalchemy import Connection, Row, and_, exists, func, select

from billing import accounts as names
from billing.ledger import transaction_id
from billing.meters import Meter
from billing.money import amount_nanos
from billing.scan import each, scan
from billing.tables import booking_clock, holds, price_rates, requests, transfers


def transfer_problems(conn: Connection) -> Iterator[str]:
    """Each transfer fits its request, its card and the accounts of its kind."""
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
            requests.c.ended_at_ms,
            holds.c.account_id.label("payer_id"),
            holds.c.organization_id,
            holds.c.closed_at_ms,
        )
        .outerjoin(price_rates, own_rate)
        .outerjoin(requests, requests.c.id == transfers.c.request_id)
        .outerjoin(holds, holds.c.request_id == transfers.c.request_id),
    )
    yield from each(rows, _name, _problems)


def repayment_problems(conn: Connection) -> Iterator[str]:
    """A debt is repaid from a top-up of the same transaction, into the same balance."""
    top_ups = transfers.alias("top_ups")
    repaid_from = exists().where(
        top_ups.c.tx_id == transfers.c.tx_id,
        top_ups.c.kind == "top_up",
        top_ups.c.credit_account_id == transfers.c.debit_account_id,
    )
    rows = scan(conn, select(transfers).where(transfers.c.kind == "repayment", ~repaid_from))
    for row in rows:
        yield f"{_name(row)} repays from another balance than was topped up."


def booking_problems(conn: Connection) -> Iterator[str]:
    """Nothing is booked after the last booking."""
    last_ms = conn.scalar(select(booking_clock.c.last_booked_at_ms))
    if last_ms is None:
        yield "The booking clock has no row."
        return
    newest = (
        conn.scalar(select(func.max(transfers.c.booked_at_ms))) or 0,
        conn.scalar(select(func.max(holds.c.closed_at_ms))) or 0,
    )
    if max(newest) > last_ms:
        yield f"The booking clock says {last_ms}, the newest booking {max(newest)}."


def _name(row: Row[Any]) -> str:
    return f"Transfer {row.tx_id}/{row.seq}"


def _problems(row: Row[Any]) -> Iterator[str]:
    match row.kind:
        case "usage":
            yield from _metered_problems(row)
            yield from _of_request_problems(row)
        case "overdraft":
            yield from _of_request_problems(row)
            expected = (names.overdraft(row.organization_id), names.prepaid(row.organization_id))
            yield from _end_problems(row, *expected)
        case "top_up":
            organization_id = row.credit_account_id.removeprefix(f"{names.PREPAID}:")
            expected = (names.OPERATOR_FUNDING, names.prepaid(organization_id))
            yield from _end_problems(row, *expected)
        case "repayment":
            organization_id = row.debit_account_id.removeprefix(f"{names.PREPAID}:")
            expected = (names.prepaid(organization_id), names.overdraft(organization_id))
            yield from _end_problems(row, *expected)
    if row.booked_at_ms < row.effective_at_ms:
        yield f"{_name(row)} is booked before it happened: {row.booked_at_ms}."


def _metered_problems(row: Row[Any]) -> Iterator[str]:
    transfer = _name(row)
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


def _of_request_problems(row: Row[Any]) -> Iterator[str]:
    """What a request moves is of its transaction, of its end, and booked as its hold was closed."""
    if row.tx_id != transaction_id(row.request_id):
        yield f"{_name(row)} is in a transaction of another request than {row.request_id}."
    if row.effective_at_ms != row.ended_at_ms:
        yield f"{_name(row)} is of another time than its request ended: {row.effective_at_ms}."
    if row.closed_at_ms is not None and row.booked_at_ms != row.closed_at_ms:
        yield f"{_name(row)} is booked at another time than its hold: {row.booked_at_ms}."


def _end_problems(row: Row[Any], debit_account_id: str, credit_account_id: str) -> Iterator[str]:
    ends = (row.debit_account_id, row.credit_account_id)
    if ends != (debit_account_id, credit_account_id):
        yield f"{_name(row)} is no {row.kind} of one customer: {ends[0]} to {ends[1]}."
