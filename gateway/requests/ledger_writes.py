"""Ledger writes of a request: bounded in time, with one error for every failure."""

import asyncio
import logging
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from billing.errors import WriterUnavailable
from gateway.dependencies import Dependencies
from gateway.errors import LedgerUnavailable

log = logging.getLogger(__name__)

T = TypeVar("T")

# A group commit takes milliseconds. A write that has not begun by then is given up: it never
# happens. One that has begun is waited for.
BEGIN_WITHIN = timedelta(seconds=15)

# A client waits for its last event meanwhile, so the tries end soon.
RETRY_PAUSES_SECONDS = (0.1, 0.5, 2.0)


async def write(
    deps: Dependencies,
    operation: Callable[[Connection], T],
    *,
    begin_within: timedelta = BEGIN_WITHIN,
) -> T:
    """Commit one operation. Raises LedgerUnavailable, or the operation's own BillingError.

    After LedgerUnavailable nothing was written, or ever will be. The one exception is a connection
    that is lost during the commit itself.
    """
    try:
        return await deps.database.write(operation, begin_within=begin_within)
    except (SQLAlchemyError, WriterUnavailable) as error:
        log.warning("ledger_write_failed", exc_info=True)
        raise LedgerUnavailable("The ledger cannot be written now; try again") from error


async def write_with_retries(deps: Dependencies, operation: Callable[[Connection], T]) -> T:
    """`write` for an operation that does nothing the second time."""
    for pause_seconds in RETRY_PAUSES_SECONDS:
        try:
            return await write(deps, operation)
        except LedgerUnavailable:
            await asyncio.sleep(pause_seconds)
    return await write(deps, operation)
