"""Waiting for cache entries that other requests are about to write, with nothing held meanwhile.

A request that could read what another one is writing waits before its transaction 1: it has no
hold, no pending entry of its own and nothing in the engine. So whoever is waited for never waits,
and a wait that ends, however it does, leaves nothing to clean up.
"""

import asyncio
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress

from billing.entries import PendingEntry
from gateway.errors import Overloaded

# The engine's queue bounds who has been submitted; those who wait here have not been.
WAITING_MAX = 1_024

# An entry of another gateway process goes live without our hearing of it: look again.
POLL_SECONDS = 0.25


class WaitingRoomFull(Overloaded):
    """Too many requests of this process wait already."""


class WaitingRoom:
    """The requests of this process that wait, by the request that each waits for."""

    def __init__(self) -> None:
        self._waiting: dict[str, set[asyncio.Event]] = {}
        self._num_waiting = 0

    def wake(self, request_id: str) -> None:
        """An entry of this request has become live, or has vanished: all who wait look again."""
        for woken in self._waiting.get(request_id, ()):
            woken.set()

    @contextmanager
    def seat(self, request_ids: Collection[str], woken: asyncio.Event) -> Iterator[None]:
        """Have `woken` set by what happens to these requests. Raises WaitingRoomFull."""
        if self._num_waiting >= WAITING_MAX:
            raise WaitingRoomFull("Too many requests wait for prompts that others are writing")
        self._num_waiting += 1
        for request_id in request_ids:
            self._waiting.setdefault(request_id, set()).add(woken)
        try:
            yield
        finally:
            self._num_waiting -= 1
            for request_id in request_ids:
                self._waiting[request_id].discard(woken)
                if not self._waiting[request_id]:
                    del self._waiting[request_id]


class EntryWait:
    """All the waiting of one request: `seconds` at most, however many entries it meets."""

    def __init__(self, room: WaitingRoom, *, boot_id: str, seconds: float) -> None:
        self._room = room
        self._boot_id = boot_id
        self._seconds = seconds
        self._ends_at: float | None = None  # from the first entry on
        self._woken = asyncio.Event()
        self._stopped_by: Exception | None = None

    @property
    def is_allowed(self) -> bool:
        """Whether there is time left to wait."""
        return self._seconds_left() > 0

    def stop(self, cause: Exception) -> None:
        """End the wait now, and fail it and any other with `cause`."""
        self._stopped_by = cause
        self._woken.set()

    async def until_changed(self, entries: Sequence[PendingEntry]) -> None:
        """Return when one of these entries may have become live or vanished, or time is up.

        Raises WaitingRoomFull, or what the wait was stopped with.
        """
        if self._ends_at is None:
            self._ends_at = asyncio.get_running_loop().time() + self._seconds
        seconds = self._seconds_left()
        if any(entry.owner_boot_id != self._boot_id for entry in entries):
            seconds = min(seconds, POLL_SECONDS)
        request_ids = {entry.request_id for entry in entries}
        with self._room.seat(request_ids, self._woken), suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._woken.wait()
        if self._stopped_by is not None:
            raise self._stopped_by
        self._woken.clear()

    def _seconds_left(self) -> float:
        if self._ends_at is None:
            return self._seconds
        return self._ends_at - asyncio.get_running_loop().time()
