"""The start of a hold: transaction 1, once nobody else is writing what the request could read."""

from functools import partial

from gateway.dependencies import Dependencies
from gateway.requests.entry_wait import EntryWait, WaitingRoomFull
from gateway.requests.ledger_writes import write
from gateway.requests.order import HeldOrder, Order, hold_order


async def open_hold_in_turn(order: Order, *, deps: Dependencies, wait: EntryWait) -> HeldOrder:
    """Open the order's hold after whatever wait is due; while it waits there is nothing to undo.

    Of several that waited for a write that failed, the first to come back writes, and the others
    find its entry pending. Raises what the wait was stopped with, WaitingRoomFull,
    LedgerUnavailable, InsufficientBalance or UnknownPrice.
    """
    waits = deps.metrics.cache_waits
    awaited_tokens = 0
    while True:
        found = await write(
            deps, partial(hold_order, order=order, deps=deps, may_wait=wait.is_allowed)
        )
        if isinstance(found, HeldOrder):
            break
        awaited_tokens = found[0].tokens
        try:
            with deps.metrics.cache_waiting.track_inprogress():
                await wait.until_changed(found)
        except Exception as error:
            waits.labels("refused" if isinstance(error, WaitingRoomFull) else "stopped").inc()
            raise
    if awaited_tokens:
        is_read = found.hold.read_tokens >= awaited_tokens
        without = "vanished" if wait.is_allowed else "timed_out"
        waits.labels("read" if is_read else without).inc()
    return found
