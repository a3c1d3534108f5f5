"""Recovery: closes the holds that no running request will close. It never charges.

A hold is left open by a gateway that died, or by this one when the database was away as a request
ended. The last event of a response leaves only after the settlement, so the client of an open hold
did not get the whole response: we cut it, it is free. The engine's journal has what it cost us.
"""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from functools import partial

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from billing.errors import BillingError, InconsistentFacts, RowUnreadable
from billing.facts import EngineFacts
from billing.holds import Hold
from billing.owners import holds_to_close, take_over
from billing.settlement import release, settle
from engine.client import EngineLost, EngineRecord
from gateway.dependencies import Dependencies
from gateway.errors import GatewayError
from gateway.requests.finish import error_type
from gateway.requests.ledger_writes import write_with_retries
from gateway.requests.open_requests import OpenRequests
from gateway.requests.usage import engine_facts

log = logging.getLogger(__name__)

ENGINE_WAIT_SECONDS = 60.0  # then holds are closed without a record: they reserve money
AGAIN_SECONDS = 0.5  # while the engine still works on a hold's request
IDLE_SECONDS = 60.0  # without a sign of an orphaned hold: look all the same


async def keep_recovering(deps: Dependencies, open_requests: OpenRequests) -> None:
    """Recover at start, when a hold was left open or its owner died, and once a minute."""
    while True:
        open_requests.hold_left_open.clear()
        try:
            num_left = await recover_holds(deps, open_requests)
        except Exception:
            log.exception("recovery_failed")
            num_left = 1
        with suppress(TimeoutError):
            async with asyncio.timeout(AGAIN_SECONDS if num_left else IDLE_SECONDS):
                await open_requests.hold_left_open.wait()


async def recover_holds(deps: Dependencies, open_requests: OpenRequests) -> int:
    """Close every hold that is this gateway's to close; return how many need another try.

    The open requests are listed after the holds were read. A request that ended in between is
    closed a second time, which changes nothing. In the other order, one that began in between would
    be taken for an orphan.
    """
    holds = await deps.database.read(partial(holds_to_close, boot_id=deps.boot_id))
    open_here = open_requests.request_ids
    orphans = [hold for hold in holds if hold.request_id not in open_here]
    if not orphans:
        return 0
    records = await _records(deps, orphans)
    num_left = 0
    for hold in orphans:
        if hold.request_id in records and records[hold.request_id] is None:
            num_left += 1  # still queued or running in the engine, which will abort it
        else:
            num_left += not await _close(deps, hold, records.get(hold.request_id))
    return num_left


async def _records(deps: Dependencies, orphans: list[Hold]) -> Mapping[str, EngineRecord | None]:
    """Return the engine's records of these holds; none from an engine that stays away."""
    try:
        info = await deps.engine.ready(ENGINE_WAIT_SECONDS)
        known = [h.request_id for h in orphans if h.engine_id in (None, info.engine_id)]
        return await deps.engine.lookup(known) if known else {}
    except EngineLost as error:
        log.warning("recovery_without_engine", extra={"reason": str(error)})
        return {}


async def _close(deps: Dependencies, hold: Hold, record: EngineRecord | None) -> bool:
    """Close one orphaned hold for free; return whether it is closed now, by us or another."""
    facts = None if record is None else engine_facts(record)
    closing = partial(
        close_orphan, hold=hold, boot_id=deps.boot_id, facts=facts, ended_at_ms=deps.now_ms()
    )
    try:
        closed = await write_with_retries(deps, closing)
    except (BillingError, GatewayError, SQLAlchemyError):
        log.exception("hold_not_recoverable", extra={"request_id": hold.request_id})
        return False
    deps.wake_ups.notify(hold.request_id)
    if closed:
        log.info(
            "hold_recovered",
            extra={
                "request_id": hold.request_id,
                "owner": hold.owner_boot_id,
                "admitted": record is not None,
            },
        )
    return True


def close_orphan(
    conn: Connection, *, hold: Hold, boot_id: str, facts: EngineFacts | None, ended_at_ms: int
) -> bool:
    """Take a hold over from the owner that it was read with and close it, free of charge.

    Returns False if the owner, or another gateway, has closed or taken it since.
    """
    if not take_over(conn, hold, boot_id=boot_id):
        return False
    if facts is not None:
        with suppress(InconsistentFacts, RowUnreadable):
            settle(
                conn,
                request_id=hold.request_id,
                owner_boot_id=boot_id,
                facts=facts,
                ended_at_ms=ended_at_ms,
                stop_reason=None,
                error_type=error_type(facts.finish_reason),
                cut_by="us",
            )
            return True
    release(
        conn,
        request_id=hold.request_id,
        owner_boot_id=boot_id,
        reason="never_admitted" if facts is None else "inconsistent_facts",
        ended_at_ms=ended_at_ms,
    )
    return True
