"""What is kept of a request: its final row and its engine record, and how both are read."""

import json
from dataclasses import dataclass, replace
from typing import Any, Literal

from sqlalchemy import Connection, Row, insert, select

from billing.facts import (
    EngineFacts,
    RefusedWrite,
    dump,
    load_grants,
    load_refused,
    load_writes,
)
from billing.holds import Hold, find_hold
from billing.lease_reports import LeaseReport, leases_of
from billing.meters import Meter, Quantities, WritePoint
from billing.rating import PricedLine
from billing.tables import kv_records, requests, transfers

Status = Literal["in_progress", "completed", "aborted", "failed", "released"]


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request, as it can be checked: what was counted, at which rates, and what the engine did.

    `writes` are the cache writes that were billed, `refused` those the engine refused; `leases` is
    what the request made the engine pin, at its cost so far. `error_type` is what a failed request
    failed with, in the words of whoever answers the client; `release_reason` why a released one was
    never admitted, in the engine's.
    """

    request_id: str
    organization_id: str
    workspace_id: str
    key_id: str
    requested_model: str
    model_id: str
    price_card_id: str
    stream: bool
    status: Status
    stop_reason: str | None
    error_type: str | None
    release_reason: str | None
    started_at_ms: int
    first_token_at_ms: int | None
    ended_at_ms: int | None
    prompt_tokens: int
    quantities: Quantities
    charged_nanos: int
    writes: tuple[WritePoint, ...]
    refused: tuple[RefusedWrite, ...]
    postings: tuple[PricedLine, ...] = ()
    engine: EngineFacts | None = None
    leases: tuple[LeaseReport, ...] = ()


def request_record(conn: Connection, request_id: str) -> RequestRecord | None:
    """Everything kept of a request; an open hold is a request in progress."""
    if "\0" in request_id:  # a client's text; PostgreSQL cannot even be asked for it
        return None
    row = conn.execute(select(requests).where(requests.c.id == request_id)).one_or_none()
    if row is not None:
        final = _final(row, _postings(conn, request_id), _engine_facts(conn, request_id))
        return replace(final, leases=leases_of(conn, request_id))
    hold = find_hold(conn, request_id)
    return in_progress(hold) if hold is not None else None


def in_progress(hold: Hold) -> RequestRecord:
    """The record of a request that has not ended."""
    return RequestRecord(
        request_id=hold.request_id,
        organization_id=hold.organization_id,
        workspace_id=hold.workspace_id,
        key_id=hold.key_id,
        requested_model=hold.requested_model,
        model_id=hold.model_id,
        price_card_id=hold.price_card_id,
        stream=hold.stream,
        status="in_progress",
        stop_reason=None,
        error_type=None,
        release_reason=None,
        started_at_ms=hold.started_at_ms,
        first_token_at_ms=None,
        ended_at_ms=None,
        prompt_tokens=hold.total_tokens,
        quantities=Quantities(),
        charged_nanos=0,
        writes=(),
        refused=(),
    )


def write_request(conn: Connection, record: RequestRecord) -> None:
    """Keep the final row of a request; it is never changed."""
    conn.execute(
        insert(requests),
        {
            "id": record.request_id,
            "organization_id": record.organization_id,
            "workspace_id": record.workspace_id,
            "key_id": record.key_id,
            "requested_model": record.requested_model,
            "model_id": record.model_id,
            "price_card_id": record.price_card_id,
            "stream": int(record.stream),
            "status": record.status,
            "stop_reason": record.stop_reason,
            "error_type": record.error_type,
            "release_reason": record.release_reason,
            "started_at_ms": record.started_at_ms,
            "first_token_at_ms": record.first_token_at_ms,
            "ended_at_ms": record.ended_at_ms,
            "prompt_tokens": record.prompt_tokens,
            "charged_nanos": record.charged_nanos,
            "writes": dump(record.writes),
            "refused": dump(record.refused),
            **{f"{meter.value}_tokens": record.quantities.of(meter) for meter in Meter},
        },
    )


def write_engine_facts(conn: Connection, request_id: str, facts: EngineFacts) -> None:
    """Keep the engine record of a request; the database checks that its four facts add up."""
    conn.execute(
        insert(kv_records),
        {
            "request_id": request_id,
            "engine_boot_id": facts.engine_boot_id,
            "finish_reason": facts.finish_reason,
            "prompt_tokens": facts.prompt_tokens,
            "tokens_reused_promised": facts.tokens_reused_promised,
            "tokens_reused_gift": facts.tokens_reused_gift,
            "tokens_read_recomputed": facts.tokens_read_recomputed,
            "tokens_computed": facts.tokens_computed,
            "reads_by_tier": json.dumps(facts.reads_by_tier, sort_keys=True),
            "tokens_recomputed_preemption": facts.tokens_recomputed_preemption,
            "num_preemptions": facts.num_preemptions,
            "grants": dump(facts.grants),
            "output_tokens": facts.output_tokens,
            "overrun_tokens": facts.overrun_tokens,
            "queued_ms": facts.queued_ms,
        },
    )


def quantities_of(row: Row[Any]) -> Quantities:
    """The five quantities of a requests row."""
    return Quantities(**{meter.value: getattr(row, f"{meter.value}_tokens") for meter in Meter})


def _final(
    row: Row[Any], postings: tuple[PricedLine, ...], engine: EngineFacts | None
) -> RequestRecord:
    return RequestRecord(
        request_id=row.id,
        organization_id=row.organization_id,
        workspace_id=row.workspace_id,
        key_id=row.key_id,
        requested_model=row.requested_model,
        model_id=row.model_id,
        price_card_id=row.price_card_id,
        stream=bool(row.stream),
        status=row.status,
        stop_reason=row.stop_reason,
        error_type=row.error_type,
        release_reason=row.release_reason,
        started_at_ms=row.started_at_ms,
        first_token_at_ms=row.first_token_at_ms,
        ended_at_ms=row.ended_at_ms,
        prompt_tokens=row.prompt_tokens,
        quantities=quantities_of(row),
        charged_nanos=row.charged_nanos,
        writes=load_writes(row.writes),
        refused=load_refused(row.refused),
        postings=postings,
        engine=engine,
    )


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
    if row is None:
        return None
    return EngineFacts(
        engine_boot_id=row.engine_boot_id,
        finish_reason=row.finish_reason,
        prompt_tokens=row.prompt_tokens,
        tokens_reused_promised=row.tokens_reused_promised,
        tokens_reused_gift=row.tokens_reused_gift,
        tokens_read_recomputed=row.tokens_read_recomputed,
        tokens_computed=row.tokens_computed,
        grants=load_grants(row.grants),
        output_tokens=row.output_tokens,
        overrun_tokens=row.overrun_tokens,
        tokens_recomputed_preemption=row.tokens_recomputed_preemption,
        num_preemptions=row.num_preemptions,
        reads_by_tier=json.loads(row.reads_by_tier),
        queued_ms=row.queued_ms,
    )
