"""Holds that nobody will close: each is settled or released from the engine's journal.

They are left behind by a gateway that was killed, by an engine that was lost in the middle of a
request, and by a database that was away when a request ended.
"""

import asyncio
import logging
from contextlib import suppress

from billing.errors import BillingError
from billing.holds import Hold, open_holds
from engine.client import EngineLost, EngineRecord
from gateway.closing import release_hold, settle_hold
from gateway.in_flight import InFlight
from gateway.parts import Parts
from gateway.usage import bill_up_to

log = logging.getLogger(__name__)

ENGINE_WAIT_SECONDS = 60.0  # one try; the next follows at once
AGAIN_SECONDS = 0.5  # while the engine still works on a hold's request, or cannot be asked
IDLE_SECONDS = 60.0  # nothing is known to be open: look all the same


async def keep_recovering(parts: Parts, in_flight: InFlight) -> None:
    """Recover at start, whenever a request left its hold open, and once a minute; until cancelled.

    One gateway a database: a hold of another living gateway would be taken for one of a dead one.
    """
    while True:
        in_flight.hold_left_open.clear()
        try:
            await parts.engine.ready(ENGINE_WAIT_SECONDS)
            num_left = await recover_holds(parts, in_flight)
        except EngineLost as error:
            log.warning("recovery_waits_for_engine", extra={"reason": str(error)})
            num_left = 1
        except Exception:
            log.exception("recovery_failed")
            num_left = 1
        with suppress(TimeoutError):
            async with asyncio.timeout(AGAIN_SECONDS if num_left else IDLE_SECONDS):
                await in_flight.hold_left_open.wait()


async def recover_holds(parts: Parts, in_flight: InFlight) -> int:
    """Close every open hold whose request is not alive here; returns how many must be asked again.

    The holds are read first: a request that ended in between is only closed a second time, which
    changes nothing, but one that began in between would be taken for dead.
    """
    holds = await parts.database.read(open_holds)
    alive = in_flight.request_ids
    orphans = [hold for hold in holds if hold.request_id not in alive]
    if not orphans:
        return 0
    records = await parts.engine.lookup([hold.request_id for hold in orphans])
    num_left = 0
    for hold in orphans:
        if hold.request_id in records and records[hold.request_id] is None:
            num_left += 1  # still queued or running: the engine has yet to see that nobody listens
            continue
        record = records.get(hold.request_id)
        if record is not None and hold.request_id in in_flight.stopped_at:
            record = bill_up_to(record, in_flight.stopped_at[hold.request_id])
        try:
            await _close(parts, hold, record)
            in_flight.stopped_at.pop(hold.request_id, None)
        except BillingError:
            log.exception("hold_not_recoverable", extra={"request_id": hold.request_id})
    return num_left


async def _close(parts: Parts, hold: Hold, record: EngineRecord | None) -> None:
    if record is None:
        await release_hold(parts, hold.request_id, reason="never_admitted")
    else:
        await settle_hold(parts, record, stop_reason=None, answered=False)
    log.info(
        "hold_recovered", extra={"request_id": hold.request_id, "admitted": record is not None}
    )
