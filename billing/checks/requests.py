"""Requests: each is what its hold says, what its transfers come to, and what the engine proves."""

from collections.abc import Iterator
from typing import Any

from sqlalchemy import Connection, Row, Subquery, case, func, select

from billing.cache_split import writes_billed
from billing.facts import GrantFact, is_failure
from billing.meters import Meter, Quantities, WritePoint, split
from billing.records import quantities_of
from billing.rows import from_json
from billing.scan import as_int, each, scan
from billing.tables import holds, kv_records, requests, transfers

# What the final row of a request has from its hold.
TERMS = (
    "organization_id", "workspace_id", "key_id", "requested_model", "model_id", "price_card_id",
    "stream", "started_at_ms",
)  # fmt: skip


def request_problems(conn: Connection) -> Iterator[str]:
    """Each request's quantities and charge are its transfers', and its prompt is billed whole."""
    posted = posted_by_meter()
    rows = scan(
        conn, select(requests, posted).outerjoin(posted, posted.c.request_id == requests.c.id)
    )
    yield from each(rows, _name, _posted_problems)


def posted_by_meter() -> Subquery:
    """Return a subquery with a row for each charged request.

    Columns: request_id, posted_METER and nanos_METER for each meter, posted_nanos.
    """
    sums = [
        func.sum(case((transfers.c.meter == meter.value, column), else_=0)).label(f"{name}_{meter}")
        for name, column in (("posted", transfers.c.quantity), ("nanos", transfers.c.amount_nanos))
        for meter in Meter
    ]
    return (
        select(
            transfers.c.request_id, *sums, func.sum(transfers.c.amount_nanos).label("posted_nanos")
        )
        .where(transfers.c.kind == "usage")
        .group_by(transfers.c.request_id)
        .subquery()
    )


def term_problems(conn: Connection) -> Iterator[str]:
    """The final row of a request is of the same terms and times as its hold."""
    terms = [holds.c[name].label(f"held_{name}") for name in TERMS]
    rows = scan(
        conn,
        select(
            requests, *terms, holds.c.total_tokens.label("held_tokens"), holds.c.state,
            holds.c.closed_at_ms,
        ).join(holds, holds.c.request_id == requests.c.id),
    )  # fmt: skip
    yield from each(rows, _name, _term_problems)


def engine_problems(conn: Connection) -> Iterator[str]:
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
    yield from each(rows, _name, _engine_problems)


def _name(row: Row[Any]) -> str:
    return f"Request {row.id}"


def _posted_problems(row: Row[Any]) -> Iterator[str]:
    quantities = quantities_of(row)
    if quantities != Quantities(**{m.value: as_int(getattr(row, f"posted_{m}")) for m in Meter}):
        yield f"Request {row.id} has other quantities than its transfers."
    if row.charged_nanos != as_int(row.posted_nanos):
        yield (
            f"Request {row.id} was charged {row.charged_nanos}, posted {as_int(row.posted_nanos)}."
        )
    nothing = quantities == Quantities()
    if not nothing and quantities.prompt != row.prompt_tokens:
        yield f"Request {row.id} bills {quantities.prompt} of {row.prompt_tokens} tokens."
    if nothing and row.status == "completed":
        yield f"Request {row.id} is {row.status} and was charged nothing."


def _term_problems(row: Row[Any]) -> Iterator[str]:
    for name in TERMS:
        if getattr(row, name) != getattr(row, f"held_{name}"):
            yield f"Request {row.id} has another {name} than its hold: {getattr(row, name)}."
    if row.prompt_tokens != row.held_tokens:
        yield f"Request {row.id} has another prompt than its hold: {row.prompt_tokens} tokens."
    if row.ended_at_ms < row.started_at_ms:
        yield f"Request {row.id} ended before it started: {row.ended_at_ms}."
    if row.closed_at_ms is not None and row.ended_at_ms > row.closed_at_ms:
        yield f"Request {row.id} ended after its hold was closed: {row.ended_at_ms}."
    is_charged = quantities_of(row) != Quantities()
    if row.state != "open" and is_charged != (row.state == "settled"):
        charged = "was charged" if is_charged else "was charged nothing"
        yield f"Request {row.id} {charged} and its hold is {row.state}."


def _engine_problems(row: Row[Any]) -> Iterator[str]:
    if row.finish_reason is None:
        if row.charged_nanos != 0 or row.status != "released":
            yield f"Request {row.id} is {row.status} without an engine record."
        return
    read = row.tokens_reused_promised + row.tokens_read_recomputed
    accounted = read + row.tokens_reused_gift + row.tokens_computed
    if accounted != row.prompt_tokens:
        yield f"Request {row.id} has engine facts for {accounted} of {row.prompt_tokens} tokens."
    if row.status == "released":
        yield f"Request {row.id} is released and has an engine record."
    if quantities_of(row) == Quantities():
        if row.status == "aborted" and row.produced_tokens > 0:
            yield (
                f"Request {row.id} is aborted after {row.produced_tokens} output tokens"
                " and was charged nothing."
            )
    else:
        yield from _billed_problems(row, read_tokens=read)


def _billed_problems(row: Row[Any], *, read_tokens: int) -> Iterator[str]:
    """What a charged request bills is what the engine did for it."""
    if row.status != _status_of(row.finish_reason):
        yield f"Request {row.id} is {row.status}, the engine says {row.finish_reason}."
    if row.cache_read_tokens != read_tokens:
        yield f"Request {row.id} bills {row.cache_read_tokens} read, the engine says {read_tokens}."
    writes = from_json(WritePoint, row.writes, column="writes")
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


def _status_of(finish_reason: Any) -> str:
    """Return the status of a charged request that the engine ended so."""
    if is_failure(finish_reason):
        return "failed"
    return "aborted" if finish_reason == "aborted" else "completed"
