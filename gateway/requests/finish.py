"""Transaction 2 (settle or release): exactly one of them for each request.

Both are idempotent: when in doubt whether a hold was closed, close it again.

The charge follows from the engine's record, with one exception: the position of a stop string, if
the engine ended before it received `finish` (`usage.bill_up_to`).
"""

import logging
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from sqlalchemy import Connection

from billing.entries import Renewal, find_live, withdraw_renewals
from billing.errors import InconsistentFacts
from billing.holds import Hold
from billing.meters import Meter
from billing.settlement import CutBy, Settlement, release, settle
from engine.client import EngineLost, EngineRecord, FinishReason
from gateway.dependencies import Dependencies
from gateway.errors import ERROR_SHAPES, EngineFailed, LedgerUnavailable, Overloaded
from gateway.requests.ledger_writes import write, write_with_retries
from gateway.requests.usage import engine_facts
from gateway.wire.response import StopReason

log = logging.getLogger(__name__)


async def settle_hold(
    deps: Dependencies,
    record: EngineRecord,
    *,
    stop_reason: StopReason | None,
    first_token_at_ms: int | None = None,
    cut_by: CutBy | None = None,
) -> Settlement:
    """Settle from the engine's record: by `charge_due`'s table, what we cut is free.

    Raises LedgerUnavailable or HoldNotOwned; EngineFailed for a record that contradicts the hold,
    which is then released.
    """
    try:
        settlement = await write_with_retries(
            deps,
            partial(
                settle,
                request_id=record.request_id,
                owner_boot_id=deps.boot_id,
                facts=engine_facts(record),
                ended_at_ms=deps.now_ms(),
                stop_reason=stop_reason,
                error_type=error_type(record.finish_reason),
                first_token_at_ms=first_token_at_ms,
                cut_by=cut_by,
            ),
        )
    except InconsistentFacts as error:
        log.exception("engine_record_refused", extra={"request_id": record.request_id})
        await release_hold(deps, record.request_id, reason="inconsistent_facts")
        raise EngineFailed("The engine's record of this request contradicts itself") from error
    deps.wake_ups.notify(record.request_id)
    if not settlement.repeated:
        for meter in Meter:
            deps.metrics.tokens.labels(meter).inc(settlement.record.quantities.of(meter))
    return settlement


async def release_hold(deps: Dependencies, request_id: str, *, reason: str) -> None:
    """Charge nothing and remove the request's entries. Raises LedgerUnavailable or HoldNotOwned."""
    await write_with_retries(
        deps,
        partial(
            release,
            request_id=request_id,
            owner_boot_id=deps.boot_id,
            reason=reason,
            ended_at_ms=deps.now_ms(),
        ),
    )
    deps.wake_ups.notify(request_id)


async def withdraw(
    deps: Dependencies, hold: Hold, record: EngineRecord, renewals: Sequence[Renewal]
) -> None:
    """Take back what a free request left: its renewals of entries, and leases without an entry.

    A lease that another request's live entry covers stays. Failures are logged only: what is left
    costs us, not a customer.
    """
    keys = [write.entry_key for write in hold.writes]
    now_ms = deps.now_ms()

    def change(conn: Connection) -> set[str]:
        withdraw_renewals(conn, renewals)
        return set(find_live(conn, keys, now_ms=now_ms))

    covered: set[str] = set()
    if renewals or keys:
        try:
            covered = await write(deps, change)
        except LedgerUnavailable:
            return
    orphaned = {w.num_tokens for w in hold.writes if w.entry_key not in covered}
    lease_ids = [
        grant.lease_id
        for grant in record.grants
        if grant.write and grant.committed and grant.num_tokens in orphaned and grant.lease_id
    ]
    if lease_ids:
        with suppress(EngineLost):
            await deps.engine.unpin(lease_ids=lease_ids)


def error_type(reason: FinishReason) -> str:
    """Return the wire's error type of a request that ended so and failed."""
    return ERROR_SHAPES[EngineFailed if reason == "error" else Overloaded].type
