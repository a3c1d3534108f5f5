"""Transaction 2 of a request: exactly one settlement or one release, live and in recovery alike.

Both are idempotent: when in doubt whether a hold was closed, close it again.

The charge follows from the engine's record, with one exception: the position of a stop string, if
the engine ended before it received `finish`. This process has it (`usage.bill_up_to`), also for
holds that it leaves open. After a crash the next process has the journal only, and charges every
output token in it.
"""

from functools import partial

from billing.facts import is_failure
from billing.meters import Meter, Quantities
from billing.settlement import release, settle
from engine.client import EngineLost, EngineRecord, FinishReason
from gateway.dependencies import Dependencies
from gateway.errors import ERROR_SHAPES, EngineFailed
from gateway.requests.ledger_writes import write_with_retries
from gateway.requests.usage import engine_facts
from gateway.wire.response import StopReason


async def settle_hold(
    deps: Dependencies,
    record: EngineRecord,
    *,
    stop_reason: StopReason | None,
    first_token_at_ms: int | None = None,
    answered: bool = True,
) -> Quantities:
    """Settle from the engine's record, and return the billed quantities.

    `answered` is false in recovery: a client that waited for a whole message got an error.

    Raises LedgerUnavailable, or InconsistentFacts for a record that cannot be true; the hold is
    open then.
    """
    settlement = await write_with_retries(
        deps,
        partial(
            settle,
            request_id=record.request_id,
            facts=engine_facts(record),
            ended_at_ms=deps.now_ms(),
            stop_reason=stop_reason,
            error_type=_error_type(record.finish_reason),
            first_token_at_ms=first_token_at_ms,
            answered=answered,
        ),
    )
    deps.wake_ups.notify(record.request_id)
    quantities = settlement.record.quantities
    if not settlement.repeated:
        for meter in Meter:
            deps.metrics.tokens.labels(meter).inc(quantities.of(meter))
    return quantities


async def release_hold(deps: Dependencies, request_id: str, *, reason: str) -> None:
    """Charge nothing and take back the pending entries. Raises LedgerUnavailable likewise."""
    await write_with_retries(
        deps,
        partial(release, request_id=request_id, reason=reason, ended_at_ms=deps.now_ms()),
    )
    deps.wake_ups.notify(request_id)


def _error_type(reason: FinishReason) -> str | None:
    """Return the wire's error type of a failed request; None for one that did not fail."""
    if not is_failure(reason):
        return None
    match reason:
        case "error":
            return ERROR_SHAPES[EngineFailed].type
        case "engine_lost":
            return ERROR_SHAPES[EngineLost].type
