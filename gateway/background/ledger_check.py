"""The ledger check: at start, whether the ledger has every request that the engine has served.

An engine admits a request only after its hold was committed. So a request in the engine's journal
without a hold means that the database has lost what it had committed: a deleted SQLite log, an
older copy, another database.
"""

import logging
from functools import partial

from billing.holds import unknown_requests
from engine.client import EngineLost
from gateway.dependencies import Dependencies

log = logging.getLogger(__name__)

RECENT = 1_000  # requests, the most that an engine lists
SHOWN = 3


async def check_ledger(deps: Dependencies) -> str | None:
    """Compare the ledger with the engine's last requests; return what is wrong in one sentence."""
    try:
        recent = await deps.engine.recent_requests(RECENT)
    except EngineLost:
        return None
    lost = await deps.database.read(partial(unknown_requests, request_ids=recent))
    deps.metrics.requests_lost.set(len(lost))
    if not lost:
        return None
    log.error("ledger_lacks_requests", extra={"num_requests": len(lost), "newest": lost[0]})
    shown = ", ".join(lost[:SHOWN]) + (", ..." if len(lost) > SHOWN else "")
    return (
        f"The ledger lacks {len(lost)} of the last {len(recent)} requests that the engine served"
        f" ({shown}): was a part of the database deleted, or an older copy put in its place?"
    )
