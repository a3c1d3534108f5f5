"""Recovery: settles or releases orphaned holds from the engine's journal.

A hold is orphaned by a gateway that was killed, by an engine that was lost in the middle of a
request, or by a database that was away when a request ended.
"""

import asyncio
import logging
from contextlib import suppress

from billing.errors import BillingError
from billing.holds import open_holds
from engine.client import EngineLost
from gateway.dependencies import Dependencies
from gateway.requests.finish import release_hold, settle_hold
from gateway.requests.open_requests import OpenRequests
from gateway.requests.usage import bill_up_to

log = logging.getLogger(__name__)

ENGINE_WAIT_SECONDS = 60.0  # one try; the next follows at once
AGAIN_SECONDS = 0.5  # while the engine still works on a hold's request, or cannot be asked
IDLE_SECONDS = 60.0  # nothing is known to be open: look all the same


async def keep_recovering(deps: Dependencies, open_requests: OpenRequests) -> None:
    """Recover at start, whenever a request left its hold open, and once a minute; until cancelled.

    One gateway a database: the holds of a second one would be taken for orphans.
    """
    while True:
        open_requests.hold_left_open.clear()
        try:
            await deps.engine.ready(ENGINE_WAIT_SECONDS)
            num_left = await recover_holds(deps, open_requests)
        except EngineLost as error:
            log.warning("recovery_waits_for_engine", extra={"reason": str(error)})
            num_left = 1
        except Exception:
            log.exception("recovery_failed")
            num_left = 1
        with suppress(TimeoutError):
            async with asyncio.timeout(AGAIN_SECONDS if num_left else IDLE_SECONDS):
                await open_requests.hold_left_open.wait()


async def recover_holds(deps: Dependencies, open_requests: OpenRequests) -> int:
    """Close every open hold whose request is not open here; return how many need another try.

    The open requests are listed after the holds were read. A request that ended in between is
    closed a second time, which changes nothing. In the other order, one that began in between would
    be taken for an orphan.
    """
    holds = await deps.database.read(open_holds)
    open_here = open_requests.request_ids
    orphans = [hold for hold in holds if hold.request_id not in open_here]
    if not orphans:
        return 0
    records = await deps.engine.lookup([hold.request_id for hold in orphans])
    num_left = 0
    for request_id in (hold.request_id for hold in orphans):
        try:
            if request_id not in records:
                await release_hold(deps, request_id, reason="never_admitted")
                log.info("hold_recovered", extra={"request_id": request_id, "admitted": False})
            elif (record := records[request_id]) is None:
                num_left += 1  # still queued or running in the engine, which will abort it
            else:
                cut = open_requests.stop_string_cuts.get(request_id)
                await settle_hold(deps, bill_up_to(record, cut), stop_reason=None, answered=False)
                open_requests.stop_string_cuts.pop(request_id, None)
                log.info("hold_recovered", extra={"request_id": request_id, "admitted": True})
        except BillingError:
            log.exception("hold_not_recoverable", extra={"request_id": request_id})
    return num_left
