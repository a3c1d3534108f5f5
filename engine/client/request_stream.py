"""One request in flight, as its client sees it: a queue that the link fills."""

import asyncio
from collections import deque
from collections.abc import Callable

from engine.errors import EngineLost
from engine.link.frames import Abort, ClientMessage, Finish
from engine.protocol import Event, Finished, Rejected


class LinkRequestStream:
    """An iterator over one request's events; see `engine.client.RequestStream`.

    The queue needs no bound of its own: the request's `max_tokens` and breakpoints bound how many
    events can come.
    """

    def __init__(
        self,
        request_id: str,
        *,
        send: Callable[[ClientMessage], None],
        abandon: Callable[[], None],
    ) -> None:
        """`send` puts a message on the request's link, or does nothing once that has ended.

        `abandon` is called if the stream is thrown away before its end, by whichever thread
        happens to collect it.
        """
        self.request_id = request_id
        self._send = send
        self._abandon = abandon
        self._events: deque[Event] = deque()
        self._arrived = asyncio.Event()
        self._ended = False
        self._lost: str | None = None

    def __aiter__(self) -> "LinkRequestStream":
        """The stream is its own, only iterator."""
        return self

    async def __anext__(self) -> Event:
        """The next event, when it comes."""
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
        """End the request at its `output_tokens`-th output token: the rest is overrun."""
        self._send(Finish(self.request_id, output_tokens))

    def __del__(self) -> None:
        """Nobody listens any more: let the engine stop."""
        if not self.has_ended:
            self._abandon()

    def deliver(self, event: Event) -> None:
        """Take an event from the link."""
        self._events.append(event)
        self._ended = isinstance(event, Finished | Rejected)
        self._arrived.set()

    def lose(self, reason: str) -> None:
        """Take note that the link ended: after the events that came, iteration raises."""
        if not self._ended:
            self._lost = reason
        self._arrived.set()

    @property
    def has_ended(self) -> bool:
        """Whether no more events can come."""
        return self._ended or self._lost is not None
