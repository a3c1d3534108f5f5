"""Waits until another request's pending cache entry is live or gone, before the hold.

A request that could read what another one is writing waits without a hold, without a pending entry
of its own and without anything in the engine. So a writer never waits for another request, there is
no deadlock, and a wait that ends in any way leaves nothing to clean up.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from billing.entries import PendingEntry
from gateway.wake_ups import WakeUps

# An entry of another gateway process goes live without a wake-up in this one: poll for it.
POLL_SECONDS = 0.25


class EntryWait:
    """The waiting of one request: `seconds` in all, for however many entries."""

    def __init__(self, wake_ups: WakeUps, *, boot_id: str, seconds: float) -> None:
        self._wake_ups = wake_ups
        self._boot_id = boot_id
        self._seconds = seconds
        self._ends_at: float | None = None  # set by the first entry
        self._woken = asyncio.Event()
        self._stopped_by: Exception | None = None

    @property
    def is_allowed(self) -> bool:
        """Whether there is time left to wait."""
        return self._seconds_left() > 0

    def stop(self, cause: Exception) -> None:
        """End the wait now; this wait and any later one raises `cause`."""
        self._stopped_by = cause
        self._woken.set()

    async def until_changed(self, entries: Sequence[PendingEntry]) -> None:
        """Return when one of these entries may have become live or vanished, or time is up.

        Raises TooManyWaiting, or the cause that `stop` was called with.
        """
        if self._ends_at is None:
            self._ends_at = asyncio.get_running_loop().time() + self._seconds
        seconds = self._seconds_left()
        if any(entry.owner_boot_id != self._boot_id for entry in entries):
            seconds = min(seconds, POLL_SECONDS)
        request_ids = {entry.request_id for entry in entries}
        with self._wake_ups.subscribe(request_ids, self._woken), suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._woken.wait()
        if self._stopped_by is not None:
            raise self._stopped_by
        self._woken.clear()

    def _seconds_left(self) -> float:
        if self._ends_at is None:
            return self._seconds
        return self._ends_at - asyncio.get_running_loop().time()
