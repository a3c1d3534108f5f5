"""The sweep: deletes expired cache entries once a minute."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sqlalchemy.exc import SQLAlchemyError

from billing.entries import sweep
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
        now_ms = deps.now_ms()
        try:
            await deps.database.write(lambda conn: sweep(conn, now_ms=now_ms))  # noqa: B023
        except (BillingError, SQLAlchemyError):
            log.warning("sweep_failed", exc_info=True)
        await asyncio.sleep(SWEEP_SECONDS)
