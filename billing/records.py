"""Request records: the final row of a request and its engine record, written once."""

from dataclasses import dataclass, fields
from typing import Any, Literal

from sqlalchemy import Connection, Row, insert, select

from billing.facts import EngineFacts, RefusedWrite
from billing.holds import Hold, RequestTerms, find_hold
from billing.lease_costs import LeaseCost, leases_of
from billing.meters import Meter, Quantities, WritePoint
from billing.rating import PricedLine
from billing.rows import from_row, to_row
from billing.tables import kv_records, requests, transfers

Status = Literal["in_progress", "completed", "aborted", "failed", "released"]


NOTHING = Quantities()

# Fields of a record that have no column of their name in `requests`.
KEPT_ELSEWHERE = ("request_id", "quantities", "postings", "engine", "leases")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord(RequestTerms):
    """Everything that explains a bill: quantities, rates, amounts, and what the engine did.

    error_type      what a failed request failed with: an error type of the HTTP API
    release_reason  why a released request was never admitted: the engine's word
    writes          the cache writes that were billed
    refused         the cache writes that the engine refused
    leases          what the request made the engine pin, and what that has cost so far
    """

    status: Status
    stop_reason: str | None = None
    error_type: str | None = None
    release_reason: str | None = None
    first_token_at_ms: int | None = None
    ended_at_ms: int | None = None
    prompt_tokens: int
    quantities: Quantities = NOTHING
    charged_nanos: int = 0
    writes: tuple[WritePoint, ...] = ()
    refused: tuple[RefusedWrite, ...] = ()
    postings: tuple[PricedLine, ...] = ()
    engine: EngineFacts | None = None
    leases: tuple[LeaseCost, ...] = ()


def request_record(
    conn: Connection, request_id: str, *, organization_id: str | None = None
) -> RequestRecord | None:
    """Return the record of a request, or None; an open hold is a request in progress.

    With `organization_id`, a request of another organisation is None, after the same queries as a
    request that does not exist: the response time does not reveal the difference.
    """
    if "\0" in request_id:  # a client may send it; a query with it fails on PostgreSQL
        return None
    query = select(requests).where(requests.c.id == request_id)
    if organization_id is not None:
        query = query.where(requests.c.organization_id == organization_id)
    row = conn.execute(query).one_or_none()
    if row is not None:
        return from_row(
            RequestRecord,
            row,
            request_id=request_id,
            quantities=quantities_of(row),
            postings=_postings(conn, request_id),
            engine=_engine_facts(conn, request_id),
            leases=leases_of(conn, request_id),
        )
    hold = find_hold(conn, request_id, without_writes=True)
    if hold is None or organization_id not in (None, hold.organization_id):
        return None
    return in_progress(hold)


def in_progress(hold: Hold) -> RequestRecord:
    """Return the record of a request that has not ended."""
    terms = {field.name: getattr(hold, field.name) for field in fields(RequestTerms)}
    return RequestRecord(**terms, status="in_progress", prompt_tokens=hold.total_tokens)


def write_request(conn: Connection, record: RequestRecord) -> None:
    """Insert the final row of a request; it is never changed."""
    counted = {f"{meter.value}_tokens": record.quantities.of(meter) for meter in Meter}
    columns = to_row(record, omit=KEPT_ELSEWHERE)
    conn.execute(insert(requests), {"id": record.request_id, **columns, **counted})


def write_engine_facts(conn: Connection, request_id: str, facts: EngineFacts) -> None:
    """Insert the engine record of a request; the database checks that its four facts add up."""
    conn.execute(insert(kv_records), {"request_id": request_id, **to_row(facts)})


def quantities_of(row: Row[Any]) -> Quantities:
    """Return the five quantities of a requests row."""
    return Quantities(**{meter.value: getattr(row, f"{meter.value}_tokens") for meter in Meter})


def _postings(conn: Connection, request_id: str) -> tuple[PricedLine, ...]:
    rows = conn.execute(
        select(transfers)
        .where(transfers.c.request_id == request_id, transfers.c.kind == "usage")
        .order_by(transfers.c.seq)
    )
    return tuple(
        PricedLine(Meter(row.meter), row.quantity, row.rate_pico, row.amount_nanos) for row in rows
    )


def _engine_facts(conn: Connection, request_id: str) -> EngineFacts | None:
    row = conn.execute(
        select(kv_records).where(kv_records.c.request_id == request_id)
    ).one_or_none()
    return None if row is None else from_row(EngineFacts, row)
