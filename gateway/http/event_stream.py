"""A streamed answer: its events in order, pings in silence, and a reader that may go away."""

import asyncio
from collections.abc import AsyncIterator, Mapping

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message as AsgiMessage
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from gateway.errors import error_body
from gateway.http.disconnect import attended
from gateway.requests.generation import Generation
from gateway.requests.wire_messages import message_end, message_start
from gateway.wire.events import (
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    Event,
    MessageStop,
    Ping,
    TextDelta,
    encode,
)

# A reader that takes nothing for this long is treated as gone: the engine stops, and what it
# produced is settled. Until then its text waits in memory, bounded by the request's max_tokens.
STALLED_READER_SECONDS = 60.0


class EventStream(Response):
    """Sends one generation's events as they happen; a reader that leaves abandons it."""

    def __init__(
        self,
        generation: Generation,
        *,
        ping_seconds: float,
        headers: Mapping[str, str],
        stalled_seconds: float = STALLED_READER_SECONDS,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(
            {
                "content-type": "text/event-stream; charset=utf-8",
                "cache-control": "no-cache",
                **headers,
            }
        )
        self._generation = generation
        self._ping_seconds = ping_seconds
        self._stalled_seconds = stalled_seconds

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until the last has left. Raises ClientDisconnect for a stalled reader."""
        async with attended(self._generation, receive):
            await self._send_all(send)

    async def _send_all(self, send: Send) -> None:
        async def send_in_time(message: AsgiMessage) -> None:
            try:
                async with asyncio.timeout(self._stalled_seconds):
                    await send(message)
            except TimeoutError:
                raise ClientDisconnect from None

        await send_in_time(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        async for event in message_events(self._generation, ping_seconds=self._ping_seconds):
            body = encode(event)
            await send_in_time({"type": "http.response.body", "body": body, "more_body": True})
        await send_in_time({"type": "http.response.body", "body": b"", "more_body": False})


async def message_events(generation: Generation, *, ping_seconds: float) -> AsyncIterator[Event]:
    """The events of one answer, from message_start to message_stop or to an error.

    A stream never just ends: a client takes that for success. The caller has seen the generation
    admitted, so that usage is known; the end is told only after it has been settled.
    """
    yield message_start(generation.order, await generation.admitted())
    num_blocks = 0
    try:
        async for text in texts_or_silence(generation, ping_seconds=ping_seconds):
            if text is None:
                yield Ping()
                continue
            if num_blocks == 0:
                num_blocks = 1
                yield ContentBlockStart(index=0)
                yield Ping()
            yield ContentBlockDelta(index=0, delta=TextDelta(text=text))
        ending = await generation.ended()
    except Exception as error:  # noqa: BLE001 - whatever failed, the client must be told
        yield error_body(error, request_id=generation.order.request_id)
        return
    if num_blocks:
        yield ContentBlockStop(index=0)
    yield message_end(ending)
    yield MessageStop()


async def texts_or_silence(
    generation: Generation, *, ping_seconds: float
) -> AsyncIterator[str | None]:
    """The answer's text as it comes; None for each `ping_seconds` without any."""
    while True:
        try:
            async with asyncio.timeout(ping_seconds):
                text = await generation.next_text()
        except TimeoutError:
            yield None
        else:
            if not text:
                return
            yield text
