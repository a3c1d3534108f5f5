"""`GET /v1/kvmeter/requests/{id}`: what a request cost and why, for the customer to verify."""

from functools import partial
from typing import Any

from fastapi import APIRouter

from billing.facts import EngineFacts
from billing.lease_costs import LeaseCost
from billing.rating import PricedLine
from billing.records import RequestRecord, request_record
from billing.rows import as_json
from gateway.errors import NotFound
from gateway.http.auth import AnyCaller, Deps
from gateway.requests.usage import usage_of

router = APIRouter()


@router.get("/v1/kvmeter/requests/{request_id}")
async def get_request(request_id: str, caller: AnyCaller, deps: Deps) -> dict[str, Any]:
    """Return the record of one request of the caller's organisation.

    A customer key sees its workspace's requests and those of the organisation's other workspaces;
    so does an admin key. Another organisation's request looks like one that never was.
    """
    query = partial(request_record, request_id=request_id, organization_id=caller.organization_id)
    record = await deps.database.read(query)
    if record is None:
        raise NotFound(f"request: {request_id}")
    return record_body(record)


def record_body(record: RequestRecord) -> dict[str, Any]:
    """The record on the wire. Numbers of the ledger are strings: no reader may round them."""
    return {
        "id": record.request_id,
        "type": "kvmeter_request",
        "organization_id": record.organization_id,
        "workspace_id": record.workspace_id,
        "key_id": record.key_id,
        "model": record.model_id,
        "requested_model": record.requested_model,
        "stream": record.stream,
        "status": record.status,
        "stop_reason": record.stop_reason,
        "error_type": record.error_type,
        "release_reason": record.release_reason,
        "started_at_ms": record.started_at_ms,
        "first_token_at_ms": record.first_token_at_ms,
        "ended_at_ms": record.ended_at_ms,
        "price_card": record.price_card_id,
        "usage": usage_of(record.quantities).model_dump(),
        "postings": [_posting(line) for line in record.postings],
        "charged_nanos": str(record.charged_nanos),
        "refused": [as_json(refused) for refused in record.refused],
        "engine": None if record.engine is None else _engine(record.engine),
        "leases": [_lease(lease) for lease in record.leases],
    }


def _posting(line: PricedLine) -> dict[str, str]:
    return {
        "meter": line.meter.value,
        "quantity": str(line.quantity),
        "rate_pico": str(line.rate_pico),
        "amount_nanos": str(line.amount_nanos),
    }


def _lease(lease: LeaseCost) -> dict[str, Any]:
    """What keeping one written prefix has cost, as reported last."""
    return {
        "id": lease.lease_id,
        "tokens": lease.num_tokens,
        "reason": lease.reason,
        "tier": lease.tier,
        "idle_block_ms": lease.idle_block_ms,
        "contended_block_ms": lease.contended_block_ms,
    }


def _engine(facts: EngineFacts) -> dict[str, Any]:
    """Return the engine record; the first four numbers add up to `prompt_tokens`."""
    body = as_json(facts)
    boot_id = body.pop("engine_boot_id")
    return {**body, "boot_id": boot_id}
