"""One client connection below the application: timers, limits and refusals of bad HTTP.

The application sees complete request heads only. Before that the client has no key, so it gets
little memory and little time. A connection has a timer in every state:

    waiting for a head, or in one     HEAD_SECONDS
    between two requests              uvicorn's keep-alive, 5 s
    in a body that the route reads    BODY_WAIT_SECONDS in bodies.py
    responding                        the request's own limits; STALL_SECONDS without reading
    refused before its body's end     LINGER_SECONDS, in which what still comes is dropped
    closing                           LINGER_SECONDS until what is unsent is dropped
"""

import asyncio
import logging
import socket
from typing import cast

from fastapi import FastAPI
from typing_extensions import override
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from gateway.dependencies import Dependencies
from gateway.errors import (
    GatewayError,
    InvalidRequest,
    Overloaded,
    RequestTimeout,
    RequestTooLarge,
)
from gateway.http.connection_limits import ConnectionLimits
from gateway.http.error_responses import error_response

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 << 10  # the SDK sends one kilobyte; proxies stop at 8 to 32
HEAD_SECONDS = 30.0  # from the connection, or a head's first byte, to its last
LINGER_SECONDS = 5.0
STALL_SECONDS = 60.0

# Chunk sizes, their extensions and trailers: what a chunked body may have beside its bytes. Even
# one-byte chunks need only five bytes each.
MAX_FRAMING_BYTES = 64 << 10
MAX_FRAMING_RATIO = 16

MAX_PIPELINED = 16  # requests that wait on one connection, each with its head in memory
MAX_PIPELINED_BODY_BYTES = 64 << 10

PROBE = b"HTTP/1.1 102 Processing\r\n\r\n"
PROBE_SECONDS = (0.02, 10.0)  # the first pause between two, and the longest
TCP_CLOSE = 7  # Linux: the state of a connection that was reset


class HttpConnection(HttpToolsProtocol):
    """One client's connection; `uvicorn` makes one for each that it accepts."""

    _head_bytes = 0  # of the head that is being read, as received
    _parsed_head_bytes = 0
    _reads_head = True
    _received_bytes = 0  # of this message, from its head's first byte
    _body_bytes = 0  # of this message
    _ignores_data = False  # refused: what still comes is dropped
    _is_counted = False
    _timer: asyncio.TimerHandle | None = None  # of a head, or of a lingering close
    _stall_timer: asyncio.TimerHandle | None = None

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._is_counted = self._limits.add(self._address)
        if not self._is_counted:
            self._refuse(Overloaded("Too many connections"))
            self._close()
            return
        self._begin_head()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._set_timer(None)
        self._end_stall()
        if self._is_counted:
            self._limits.remove(self._address)
        super().connection_lost(exc)

    @override
    def data_received(self, data: bytes) -> None:
        if self._ignores_data:
            return
        self._received_bytes += len(data)
        super().data_received(data)
        self._require_measure(len(data))

    def _require_measure(self, num_bytes: int) -> None:
        """Refuse a head, or what a body has beside its bytes, that goes on for too long."""
        if self._ignores_data:
            return
        if self._reads_head:
            self._head_bytes += num_bytes
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(_head_too_large())
            return
        framing = self._received_bytes - self._body_bytes - self._head_bytes
        if framing > MAX_FRAMING_BYTES + MAX_FRAMING_RATIO * self._body_bytes:
            self._refuse(RequestTooLarge("Request has too much beside its body: trailers, chunks"))

    @override
    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more: it has gone, or has only closed its half and waits.

        Before a response has begun the two are told apart by a 102, which resets the connection of
        a client that has gone. After that it counts as gone.
        """
        cycle = self._cycle
        if self._ignores_data or cycle is None or cycle.response_started:
            return False
        if cycle.more_body:
            self._refuse(InvalidRequest("The request ended before its body"))
        else:
            self._probe(PROBE_SECONDS[0])
        return True

    def _probe(self, seconds: float) -> None:
        """Find out whether the client still reads, now and then until a response begins."""
        if self.transport.is_closing() or self.cycle.response_started:
            return
        if _is_reset(self.transport):
            self.transport.abort()
            return
        self.transport.write(PROBE)
        later = min(4 * seconds, PROBE_SECONDS[1])
        self._set_timer(self.loop.call_later(seconds, self._probe, later))

    @override
    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._received_bytes = self._body_bytes = 0
        self._begin_head()

    @override
    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count_head(len(url))

    @override
    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reads_head:  # a trailer is counted as it arrives, and never kept
            super().on_header(name, value)
            self._count_head(len(name) + len(value) + 4)

    @override
    def on_headers_complete(self) -> None:
        if self._ignores_data:
            return
        if self._parsed_head_bytes > MAX_HEAD_BYTES:
            self._refuse(_head_too_large())
            return
        if self.parser.get_http_version() == "1.1" and not self._has_host:
            self._refuse(InvalidRequest("header is required", path="host"))
            return
        self._end_head()
        active = self._cycle
        super().on_headers_complete()
        if self.pipeline and active is not None:
            # Paused, a connection does not notice that its client has gone.
            self.flow.resume_reading()
            if len(self.pipeline) > MAX_PIPELINED:
                self.transport.abort()

    @override
    def on_body(self, body: bytes) -> None:
        if self._ignores_data:
            return
        self._body_bytes += len(body)
        super().on_body(body)
        if self.pipeline and len(self.cycle.body) > MAX_PIPELINED_BODY_BYTES:
            self.transport.abort()

    @override
    def on_message_complete(self) -> None:
        if not self._ignores_data:
            super().on_message_complete()
            self._received_bytes = self._body_bytes = self._head_bytes = 0

    @override
    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.more_body and not self.pipeline and not self.transport.is_closing():
            self._linger()  # refused early: the client may still be sending

    @override
    def pause_writing(self) -> None:
        super().pause_writing()
        self._end_stall()
        self._stall_timer = self.loop.call_later(STALL_SECONDS, self.transport.abort)

    @override
    def resume_writing(self) -> None:
        self._end_stall()
        super().resume_writing()

    @override
    def timeout_keep_alive_handler(self) -> None:
        self._close()

    @override
    def send_400_response(self, msg: str) -> None:
        self._refuse(InvalidRequest(msg))

    @property
    def _cycle(self) -> RequestResponseCycle | None:
        """The request that was read last; none before the first one."""
        return cast("RequestResponseCycle | None", self.cycle)

    @property
    def _address(self) -> str:
        return self.client[0] if self.client else ""

    @property
    def _limits(self) -> ConnectionLimits:
        limits: ConnectionLimits = cast("FastAPI", self.config.app).state.connection_limits
        return limits

    @property
    def _has_host(self) -> bool:
        return any(name == b"host" for name, _ in self.headers)

    def _count_head(self, num_bytes: int) -> None:
        self._parsed_head_bytes += num_bytes

    def _begin_head(self) -> None:
        self._reads_head = True
        self._head_bytes = self._parsed_head_bytes = 0
        timeout = RequestTimeout(f"The request did not arrive within {HEAD_SECONDS:.0f} seconds")
        self._set_timer(self.loop.call_later(HEAD_SECONDS, self._refuse, timeout))

    def _end_head(self) -> None:
        self._reads_head = False
        self._head_bytes = self._parsed_head_bytes
        self._set_timer(None)

    def _set_timer(self, timer: asyncio.TimerHandle | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer

    def _end_stall(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _refuse(self, error: GatewayError) -> None:
        """Respond to what is not a valid request, and close; once."""
        if self._ignores_data or self.transport.is_closing():
            return
        self._ignores_data = True
        self._reads_head = False
        cycle = self._cycle
        if cycle is not None and cycle.response_started and not cycle.response_complete:
            # An error in the middle of a response would corrupt it. The application learns that
            # more has come than the request, and ends the response in its own way.
            cycle.keep_alive = False
            cycle.message_event.set()
            self._set_timer(None)
            return
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True  # this is the response; the application's is dropped
            cycle.message_event.set()
        self.transport.write(self._error_response(error))
        self._linger()

    def _linger(self) -> None:
        """Send no more, and drop what still comes for a while: a reset would cost the response."""
        self._ignores_data = True
        self._unset_keepalive_if_required()
        self.transport.write_eof()
        self._set_timer(self.loop.call_later(LINGER_SECONDS, self._close))

    def _close(self) -> None:
        """Close once everything is sent; drop it if the client does not read."""
        self.transport.close()
        self._set_timer(self.loop.call_later(LINGER_SECONDS, self.transport.abort))

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


def _head_too_large() -> RequestTooLarge:
    return RequestTooLarge(f"Request head exceeds the maximum size: {MAX_HEAD_BYTES} bytes")


def _is_reset(transport: asyncio.Transport) -> bool:
    info = transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
    return bool(info[0] == TCP_CLOSE)
