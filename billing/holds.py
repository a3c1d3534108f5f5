"""Holds: transaction 1 of a request reserves its worst case, until settlement or release."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import Connection, func, insert, select, update

from billing import accounts as names
from billing import entries
from billing.errors import HoldNotFound, InsufficientBalance, UnknownOrganization
from billing.ledger import balance
from billing.meters import TtlClass, WritePoint
from billing.rows import from_row, to_row
from billing.tables import accounts, holds, organizations

HoldState = Literal["open", "settled", "released"]
HoldRow = dict[str, Any]  # the columns of `holds`


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTerms:
    """Customer, key, model and price card of a request: fixed by its hold, kept in its record."""

    request_id: str
    organization_id: str
    workspace_id: str
    key_id: str
    model_id: str
    requested_model: str
    price_card_id: str
    stream: bool
    started_at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold(RequestTerms):
    """The worst case of a request, reserved until its true cost is known.

    writes         the breakpoints that ask for a cache write, not yet granted
    owner_boot_id  the gateway process that opened the hold, or took it over from a dead one
    engine_id      the engine that the request goes to; None in holds of an older version
    """

    total_tokens: int
    read_tokens: int
    max_tokens: int
    writes: tuple[WritePoint, ...]
    amount_nanos: int
    owner_boot_id: str
    engine_id: str | None
    state: HoldState = "open"


def open_hold(
    conn: Connection,
    hold: Hold,
    *,
    ttl_ms: Mapping[TtlClass, int],
    awaited_until_ms: int | None = None,
) -> None:
    """Reserve the worst case, and insert pending entries for the writes.

    Other requests may wait for the pending entries until `awaited_until_ms`; with None they do not.
    Raises InsufficientBalance (prepaid only) or UnknownOrganization, and then leaves nothing.
    """
    account_id = _reserve(conn, hold)
    conn.execute(insert(holds), {**to_row(hold), "account_id": account_id, "state": "open"})
    entries.write_pending(
        conn,
        hold.request_id,
        hold.writes,
        ttl_ms=ttl_ms,
        started_at_ms=hold.started_at_ms,
        awaited_until_ms=awaited_until_ms,
    )


def unknown_requests(conn: Connection, request_ids: Sequence[str]) -> list[str]:
    """Return those of these requests, at most 10,000, that have no hold, in their order."""
    known = set(conn.scalars(select(holds.c.request_id).where(holds.c.request_id.in_(request_ids))))
    return [request_id for request_id in request_ids if request_id not in known]


def find_hold(conn: Connection, request_id: str, *, without_writes: bool = False) -> Hold | None:
    """Return the hold of a request, open or closed, or None.

    `without_writes` leaves `writes` empty: a release does not need them, and so closes also a hold
    whose writes cannot be read. Raises RowUnreadable.
    """
    row = conn.execute(select(holds).where(holds.c.request_id == request_id)).one_or_none()
    if row is None:
        return None
    return from_row(Hold, row, writes=()) if without_writes else from_row(Hold, row)


def open_hold_rows(conn: Connection) -> list[HoldRow]:
    """Return the open holds as they are stored, oldest first, also those that cannot be read."""
    query = select(holds).where(holds.c.state == "open").order_by(holds.c.started_at_ms)
    return [dict(row._mapping) for row in conn.execute(query)]


def hold_row(conn: Connection, request_id: str) -> HoldRow:
    """Return a hold as it is stored. Raises HoldNotFound."""
    row = conn.execute(select(holds).where(holds.c.request_id == request_id)).one_or_none()
    if row is None:
        raise HoldNotFound(request_id)
    return dict(row._mapping)


@dataclass(frozen=True, slots=True)
class OpenHold:
    """An open hold by name, whatever else of it can be read."""

    request_id: str
    owner_boot_id: str


def open_holds(conn: Connection) -> list[OpenHold]:
    """Return the open holds by name, oldest first."""
    query = select(holds).where(holds.c.state == "open").order_by(holds.c.started_at_ms)
    return [OpenHold(row.request_id, row.owner_boot_id) for row in conn.execute(query)]


@dataclass(frozen=True, slots=True)
class OpenHoldCount:
    """How many holds are open in the whole database, and since when; None if none is."""

    num_holds: int
    oldest_started_at_ms: int | None


def count_open_holds(conn: Connection) -> OpenHoldCount:
    """Return the number and the age of the open holds, without reading them."""
    counting = select(func.count(), func.min(holds.c.started_at_ms)).where(holds.c.state == "open")
    num_holds, oldest_started_at_ms = conn.execute(counting).one()
    return OpenHoldCount(num_holds, oldest_started_at_ms)


def close_hold(
    conn: Connection, request_id: str, state: HoldState, *, closed_at_ms: int
) -> str | None:
    """Close an open hold and give its reservation back; return the account that pays.

    Returns None, and changes nothing, if the hold is not open.
    """
    closing = (
        update(holds)
        .where(holds.c.request_id == request_id, holds.c.state == "open")
        .values(state=state, closed_at_ms=closed_at_ms)
        .returning(holds.c.account_id, holds.c.amount_nanos)
    )
    closed = conn.execute(closing).one_or_none()
    if closed is None:
        return None
    conn.execute(
        update(accounts)
        .where(accounts.c.id == closed.account_id)
        .values(debits_pending_nanos=accounts.c.debits_pending_nanos - closed.amount_nanos)
    )
    return str(closed.account_id)


def require_funds(conn: Connection, organization_id: str) -> None:
    """Require that a prepaid organisation has any balance that is not reserved.

    Raises InsufficientBalance.
    """
    if balance(conn, names.prepaid(organization_id)).available_nanos <= 0:
        raise InsufficientBalance(organization_id, needed_nanos=1)


def _reserve(conn: Connection, hold: Hold) -> str:
    """Add to the payer's pending debits; return the account. One guarded UPDATE checks and adds."""
    mode = conn.scalar(
        select(organizations.c.mode).where(organizations.c.id == hold.organization_id)
    )
    if mode is None:
        raise UnknownOrganization(hold.organization_id)
    prepaid = mode == "prepaid"
    payer = names.prepaid if prepaid else names.unbilled
    account_id = payer(hold.organization_id)
    reserving = (
        update(accounts)
        .where(accounts.c.id == account_id)
        .values(debits_pending_nanos=accounts.c.debits_pending_nanos + hold.amount_nanos)
    )
    if prepaid:
        available = (
            accounts.c.credits_posted_nanos
            - accounts.c.debits_posted_nanos
            - accounts.c.debits_pending_nanos
        )
        reserving = reserving.where(available >= hold.amount_nanos)
    if conn.execute(reserving).rowcount == 0:
        raise InsufficientBalance(hold.organization_id, needed_nanos=hold.amount_nanos)
    return account_id
