"""A streamed response: server-sent events in order, pings in silence, a client that may leave."""

import asyncio
from collections.abc import AsyncIterator, Mapping

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message as AsgiMessage
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from gateway.errors import error_body
from gateway.http.disconnect import abort_on_disconnect
from gateway.requests.generation import Generation
from gateway.requests.output import BlockEvent, BlockStart
from gateway.requests.wire_messages import block_event, message_delta, message_start
from gateway.wire.events import Event, MessageStop, Ping, encode

# A client that reads nothing for this long is treated as disconnected: the engine aborts, and what
# was produced is settled. Until then its events wait in memory, bounded by the max_tokens.
STALLED_CLIENT_SECONDS = 60.0


class EventStream(Response):
    """Sends the events of one generation as they happen; a disconnect aborts it."""

    def __init__(
        self,
        generation: Generation,
        *,
        ping_seconds: float,
        headers: Mapping[str, str],
        stalled_seconds: float = STALLED_CLIENT_SECONDS,
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
        """Send the events until the last has left. Raises ClientDisconnect for a stalled client."""
        async with abort_on_disconnect(self._generation, receive):
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
    """Yield the events of one stream, from message_start to message_stop or to an error.

    A stream never just ends: a client takes that for success. The generation has been admitted, so
    that usage is known; the last events leave only after the settlement.
    """
    yield message_start(generation.order, await generation.admitted())
    try:
        async for event in events_or_silence(generation, ping_seconds=ping_seconds):
            if event is None:
                yield Ping()
                continue
            yield block_event(event)
            if event == BlockStart(0):
                yield Ping()
        ending = await generation.ended()
    except Exception as error:  # noqa: BLE001 - the client needs an error event for any failure
        yield error_body(error, request_id=generation.order.request_id)
        return
    yield message_delta(ending)
    yield MessageStop()


async def events_or_silence(
    generation: Generation, *, ping_seconds: float
) -> AsyncIterator[BlockEvent | None]:
    """Yield block events as they come, and None for each `ping_seconds` without any."""
    while True:
        try:
            async with asyncio.timeout(ping_seconds):
                event = await generation.next_event()
        except TimeoutError:
            yield None
        else:
            if event is None:
                return
            yield event
