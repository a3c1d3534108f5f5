"""The sweep: deletes expired cache entries once a minute."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from sqlalchemy.exc import SQLAlchemyError

from billing.entries import SWEEP_MAX, sweep
from billing.errors import BillingError
from gateway.dependencies import Dependencies

log = logging.getLogger(__name__)

SWEEP_SECONDS = 60.0  # an expired entry is never read; sweeping only keeps the table small


@asynccontextmanager
async def sweeping(deps: Dependencies) -> AsyncIterator[None]:
    """Remove expired cache entries once a minute while the block runs."""
    task = asyncio.create_task(_keep_sweeping(deps), name="sweep")
    try:
        yield
    finally:
        task.cancel()


async def _keep_sweeping(deps: Dependencies) -> None:
    while True:
        try:
            await sweep_all(deps)
        except (BillingError, SQLAlchemyError):
            log.warning("sweep_failed", exc_info=True)
        await asyncio.sleep(SWEEP_SECONDS)


async def sweep_all(deps: Dependencies, *, num_max: int = SWEEP_MAX) -> None:
    """Delete every expired entry, at most `num_max` a transaction; requests write in between."""
    piece = partial(sweep, now_ms=deps.now_ms(), num_max=num_max)
    while await deps.database.write(piece) == num_max:
        pass
