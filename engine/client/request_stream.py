"""RequestStream over the link: a queue of one request's events, which the link client fills."""

import asyncio
from collections import deque
from collections.abc import Callable

from engine.errors import EngineLost
from engine.link.frames import Abort, ClientMessage, Finish
from engine.protocol import Event, Finished, Rejected


class LinkRequestStream:
    """A RequestStream. Its queue is bounded by the request's `max_tokens` and breakpoints."""

    def __init__(
        self,
        request_id: str,
        *,
        send: Callable[[ClientMessage], None],
        abandon: Callable[[], None],
    ) -> None:
        """`send` writes a message to the request's link; it does nothing once that has ended.

        `abandon` is called if the stream is garbage-collected before its end, from any thread.
        """
        self.request_id = request_id
        self._send = send
        self._abandon = abandon
        self._events: deque[Event] = deque()
        self._arrived = asyncio.Event()
        self._ended = False
        self._lost: str | None = None

    def __aiter__(self) -> "LinkRequestStream":
        """Return the stream itself."""
        return self

    async def __anext__(self) -> Event:
        """Wait for the next event and return it."""
        while not self._events:
            if self._ended:
                raise StopAsyncIteration
            if self._lost is not None:
                raise EngineLost(self._lost)
            self._arrived.clear()
            await self._arrived.wait()
        return self._events.popleft()

    def abort(self) -> None:
        """Ask the engine to stop; the Finished event still comes. Idempotent."""
        self._send(Abort(self.request_id))

    def finish(self, output_tokens: int) -> None:
        """End the request at its `output_tokens`-th output token; later tokens are overrun."""
        self._send(Finish(self.request_id, output_tokens))

    def __del__(self) -> None:
        """Abort the request if its stream is collected before the last event."""
        if not self.has_ended:
            self._abandon()

    def deliver(self, event: Event) -> None:
        """Append an event from the link."""
        self._events.append(event)
        self._ended = isinstance(event, Finished | Rejected)
        self._arrived.set()

    def lose(self, reason: str) -> None:
        """Mark the link as ended: after the events received so far, iteration raises EngineLost."""
        if not self._ended:
            self._lost = reason
        self._arrived.set()

    @property
    def has_ended(self) -> bool:
        """Whether no more events can arrive."""
        return self._ended or self._lost is not None
