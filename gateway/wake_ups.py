"""Wake-ups: waiting requests of this process learn that another one's cache entry has changed."""

import asyncio
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from gateway.errors import TooManyWaiting

# The engine's queue bounds the submitted requests; a request that waits here is not submitted yet.
MAX_WAITING = 1_024


class WakeUps:
    """Events of waiting requests, by the id of the request that writes the entry."""

    def __init__(self) -> None:
        self._events: dict[str, set[asyncio.Event]] = {}
        self._num_waiting = 0

    def notify(self, request_id: str) -> None:
        """Wake all that wait for this request: an entry of it has become live or has vanished."""
        for event in self._events.get(request_id, ()):
            event.set()

    @contextmanager
    def subscribe(self, request_ids: Collection[str], event: asyncio.Event) -> Iterator[None]:
        """Have `event` set by a notification about any of these requests, while the block runs.

        Raises TooManyWaiting.
        """
        if self._num_waiting >= MAX_WAITING:
            raise TooManyWaiting("Too many requests wait for prompts that others are writing")
        self._num_waiting += 1
        for request_id in request_ids:
            self._events.setdefault(request_id, set()).add(event)
        try:
            yield
        finally:
            self._num_waiting -= 1
            for request_id in request_ids:
                self._events[request_id].discard(event)
                if not self._events[request_id]:
                    del self._events[request_id]
