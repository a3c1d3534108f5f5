"""One client connection below the application: limits, refusals of bad HTTP, a timer in each state.

The application sees complete request heads only. Before that the client has no key, so it gets
little memory and little time.

| state                                   | ends after |
|-----------------------------------------|------------|
| a head is awaited or arrives            | `HEAD_SECONDS`, with 408 |
| idle between two requests               | `http_server.IDLE_SECONDS` |
| a body arrives                          | `bodies.BODY_WAIT_SECONDS`, with 408 |
| a response is made                      | the waits of its route |
| a stream is sent, nothing is read of it | `event_stream.STALLED_CLIENT_SECONDS` |
| the response is sent, a body still comes | `closing.LINGER_SECONDS` |
| closing, nothing is read of the rest    | `closing.FLUSH_SECONDS` |
"""

import asyncio
import logging
from typing import Any, cast

import httptools
from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from typing_extensions import override
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from gateway.dependencies import Dependencies
from gateway.errors import GatewayError, InvalidRequest, Overloaded, RequestTimeout
from gateway.http.addresses import network_of
from gateway.http.closing import ClosingTransport
from gateway.http.connection_limits import ConnectionLimits
from gateway.http.error_responses import error_response
from gateway.http.read_limits import MAX_HEAD_BYTES, ReadLimits

log = logging.getLogger(__name__)

MAX_PIPELINED = 16  # requests that wait behind the running one; no SDK sends any
HEAD_SECONDS = 30.0  # from the connection, or a head's first byte, to its last
FIRST_PROBE_SECONDS = 0.02  # then twice as long, and so on: a gone client resets in a round trip
LAST_PROBE_SECONDS = 10.0

# What a half-closed client gets while it waits: an interim response, or a comment as a chunk.
STILL_PROCESSING = b"HTTP/1.1 102 Processing\r\n\r\n"
STREAM_COMMENT = b"3\r\n:\n\n\r\n"


class HttpConnection(HttpToolsProtocol):
    """One client's connection; `uvicorn` makes one for each that it accepts.

    Reading is never paused while a response is made, since a paused socket does not show that its
    client has gone. What a client sends meanwhile is bounded instead.
    """

    network = ""
    _is_admitted = False
    _has_begun_head = False
    _bytes_ahead = 0  # read while a complete request is being answered
    _is_deaf = False  # what comes now is dropped
    _is_half_closed = False
    _head_timer: asyncio.TimerHandle | None = None
    _running: RequestResponseCycle | None = None  # the request that the application has
    _is_event_stream = False  # the running request's response
    _fault: GatewayError | None = None  # what ended the running request early

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        state = cast("FastAPI", self.config.app).state
        self._connections: ConnectionLimits = state.connection_limits
        self._limits = ReadLimits()

    # What happens to the connection

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._closing = ClosingTransport(transport, loop=self.loop, has_unread=self._has_unread)
        super().connection_made(self._closing)
        self.network = network_of(self.client[0]) if self.client else ""
        self._is_admitted = self._connections.admit(self)
        if self._is_admitted:
            self._await_head()
        else:
            self._is_deaf = True
            self._closing.write(self._error_response(Overloaded("Too many connections")))
            self._closing.close_now()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._closing.end()
        if self._is_admitted:
            self._is_admitted = False
            self._connections.remove(self)
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)

    @override
    def data_received(self, data: bytes) -> None:
        if self._is_deaf or self._closing.is_closing():
            self._closing.drop(len(data))
            return
        if self._is_answering:
            self._bytes_ahead += len(data)
            if self._bytes_ahead > MAX_HEAD_BYTES:
                self._stop_listening()
                return
        try:
            self._parse(data)
        except httptools.HttpParserUpgrade:
            # The parser cannot go on behind an upgrade that we do not make.
            self._stop_listening()
        except httptools.HttpParserError as error:
            raised = error.__context__  # by one of our callbacks
            if not isinstance(raised, GatewayError):
                raised = InvalidRequest("Invalid HTTP request received.")
            self._refuse(raised)
        except GatewayError as error:
            self._refuse(error)

    @override
    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep a half-closed connection until its complete requests have been answered.

        Whether the client has gone altogether shows only when it resets what we send, so something
        is sent to find out.
        """
        if self._is_deaf or self._closing.is_closing() or self._running is None:
            return False
        if self._running.more_body:
            self._refuse(InvalidRequest("The request ended before its body"))
            return True
        self._is_half_closed = True
        self._stop_listening()
        self._probe(FIRST_PROBE_SECONDS)
        return True

    def abort(self) -> None:
        """Close now, to make room: this connection has been idle longest."""
        self._is_admitted = False
        self._closing.abort()

    @override
    def shutdown(self) -> None:
        if self._closing.is_closing():
            self._closing.close_now()
        else:
            super().shutdown()

    # What the parser finds

    @override
    def on_message_begin(self) -> None:
        self._unset_keepalive_if_required()
        super().on_message_begin()
        self._await_head()
        self._has_begun_head = True
        self._limits.begin_head()

    @override
    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._limits.add_to_head(len(url))

    @override
    def on_header(self, name: bytes, value: bytes) -> None:
        num_bytes = len(name) + len(value) + len(b": \r\n")
        if not self._limits.awaits_head:
            self._limits.add_trailer(num_bytes)  # and dropped: nothing reads one
            return
        self._limits.add_header(num_bytes)
        super().on_header(name, value)

    @override
    def on_headers_complete(self) -> None:
        self._require_host()
        if len(self.pipeline) == MAX_PIPELINED:
            raise InvalidRequest(f"More than {MAX_PIPELINED} requests sent ahead")
        self._stop_head_timer()
        self._has_begun_head = False
        self._limits.end_head()
        super().on_headers_complete()
        self._keep_reading()

    @override
    def on_body(self, body: bytes) -> None:
        self._limits.add_body()
        super().on_body(body)
        self._keep_reading()

    @override
    def on_message_complete(self) -> None:
        self._limits.end_message()
        super().on_message_complete()

    @override
    def on_response_complete(self) -> None:
        self._running = None
        self._bytes_ahead = 0
        if self._is_admitted:
            self._connections.set_idle(self)
        super().on_response_complete()
        if self._has_begun_head:
            self._unset_keepalive_if_required()  # its own timer runs

    def _parse(self, data: bytes) -> None:
        offset = 0
        while offset < len(data) and not self._closing.is_closing():
            num_bytes = self._limits.begin_piece(len(data) - offset)
            self.parser.feed_data(data[offset : offset + num_bytes])
            self._limits.end_piece(num_bytes)
            offset += num_bytes

    def _require_host(self) -> None:
        """Require the Host header as RFC 9112, 3.2 does: one, or none in HTTP/1.0."""
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        if num_hosts > 1 or (num_hosts == 0 and self.parser.get_http_version() == "1.1"):
            raise InvalidRequest("exactly one is required", path="host")

    # What becomes of a request

    @override
    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:  # type: ignore[override]
        self._running = cycle
        if self._is_admitted:
            self._connections.set_busy(self)

        async def run(scope: Scope, receive: Receive, send: Send) -> None:
            async def receive_or_fault() -> Message:
                message = await receive()
                if self._fault is None:
                    return message
                return {"type": "http.disconnect", "fault": self._fault}

            async def send_and_close_early(message: Message) -> None:
                if message["type"] == "http.response.start":
                    self._is_event_stream = _is_event_stream(message)
                    if cycle.more_body:
                        cycle.keep_alive = False  # nothing else can follow on this connection
                await send(message)

            await app(scope, receive_or_fault, send_and_close_early)

        super()._start_asgi_task(cycle, cast("Any", run))

    @property
    def _is_answering(self) -> bool:
        """Whether a response is being made to a request that has arrived completely."""
        running = self._running
        return running is not None and not (running.response_complete or running.more_body)

    def _has_unread(self) -> bool:
        """Whether the client may still be sending what we will not use."""
        is_incomplete = self._running is not None and self._running.more_body
        return not self._is_half_closed and (self._is_deaf or is_incomplete)

    def _keep_reading(self) -> None:
        """Undo uvicorn's pause for a request that waits behind the running one."""
        if self.cycle is not self._running:
            self.flow.resume_reading()

    def _stop_listening(self) -> None:
        """Answer the complete requests, then close; drop everything behind them."""
        self._is_deaf = True
        self._stop_head_timer()
        last = self.cycle
        if last is not self._running and last.more_body:
            self.pipeline.popleft()
            last = self.pipeline[0][0] if self.pipeline else cast("Any", self._running)
        last.keep_alive = False

    def _probe(self, wait_seconds: float) -> None:
        """Send a half-closed client something without meaning, until it has its responses."""
        running = self._running
        if self._closing.is_closing() or running is None:
            return
        if running.response_started and self._is_event_stream:
            self._closing.write(STREAM_COMMENT)
        elif not running.response_started and running.scope["http_version"] == "1.1":
            self._closing.write(STILL_PROCESSING)
        self.loop.call_later(wait_seconds, self._probe, min(2 * wait_seconds, LAST_PROBE_SECONDS))

    # Refusals

    @override
    def send_400_response(self, msg: str) -> None:
        self._refuse(InvalidRequest(msg))

    def _await_head(self) -> None:
        self._stop_head_timer()
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._refuse_slow_head)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse_slow_head(self) -> None:
        if self._is_answering:
            self._stop_listening()
        else:
            self._refuse(
                RequestTimeout(f"The request did not arrive within {HEAD_SECONDS:.0f} seconds")
            )

    def _refuse(self, error: GatewayError) -> None:
        """Respond to what is not a valid request, and close.

        A request that is being answered ends with this error, wherever its response stands.
        """
        self._stop_head_timer()
        self._is_deaf = True
        running = self._running
        if running is None:
            self._closing.write(self._error_response(error))
            self._closing.close()
        elif self._is_answering:
            self._fault = error
            self.pipeline.clear()
            running.keep_alive = False
            running.message_event.set()
        else:
            if not running.response_started:
                self._closing.write(self._error_response(error))
            running.disconnected = True
            running.message_event.set()
            self._closing.close()

    def _error_response(self, error: GatewayError) -> bytes:
        deps = cast("Dependencies", cast("FastAPI", self.config.app).state.deps)
        request_id = deps.new_id("req")
        response = error_response(error, request_id=request_id)
        response.headers.update({"request-id": request_id, "connection": "close"})
        log.info(
            "request_refused", extra={"request_id": request_id, "status": response.status_code}
        )
        deps.metrics.requests.labels("none", str(response.status_code)).inc()
        head = b"".join(b"%b: %b\r\n" % header for header in response.raw_headers)
        return STATUS_LINE[response.status_code] + head + b"\r\n" + bytes(response.body)


def _is_event_stream(start: Message) -> bool:
    return any(
        name == b"content-type" and value.startswith(b"text/event-stream")
        for name, value in start["headers"]
    )
