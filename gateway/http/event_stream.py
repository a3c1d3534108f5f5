"""A streamed response: server-sent events in order, pings in silence, a client that may leave."""

from collections.abc import AsyncIterator, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from gateway.errors import error_body
from gateway.http.disconnect import abort_on_disconnect
from gateway.http.stall_timer import StallTimer
from gateway.requests.generation import Generation
from gateway.requests.output import BlockDelta, BlockEvent, BlockStart
from gateway.requests.wire_messages import block_event, message_delta, message_start
from gateway.wire.events import MessageStop, Ping, encode, encode_text_delta

# A client that reads nothing for this long is treated as disconnected: the engine aborts, and what
# was produced is settled. Until then its events wait in memory, bounded by the max_tokens.
STALLED_CLIENT_SECONDS = 60.0

PING = encode(Ping())


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
        timer = StallTimer(self._stalled_seconds)
        try:
            with timer:
                await send(
                    {
                        "type": "http.response.start",
                        "status": self.status_code,
                        "headers": self.raw_headers,
                    }
                )
            async for body in message_records(self._generation, ping_seconds=self._ping_seconds):
                with timer:
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            with timer:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            timer.close()


async def message_records(generation: Generation, *, ping_seconds: float) -> AsyncIterator[bytes]:
    """Yield the SSE records of one stream, from message_start to message_stop or to an error.

    Records of block events that came together are one piece: one write. A stream never just ends: a
    client takes that for success. The generation has been admitted, so that usage is known; the
    last records leave only after the settlement.
    """
    yield encode(message_start(generation.order, await generation.admitted()))
    try:
        while (events := await generation.next_events(wait_seconds=ping_seconds)) is not None:
            yield b"".join(map(block_record, events)) if events else PING
        ending = await generation.ended()
    except Exception as error:  # noqa: BLE001 - the client needs an error event for any failure
        yield encode(error_body(error, request_id=generation.order.request_id))
        return
    yield encode(message_delta(ending))
    yield encode(MessageStop())


def block_record(event: BlockEvent) -> bytes:
    """Return the SSE record of a block event; a ping follows the start of the first block."""
    if isinstance(event, BlockDelta):
        return encode_text_delta(event.index, event.text)
    record = encode(block_event(event))
    return record + PING if event == BlockStart(0) else record
