"""One client connection below the application: limits of a request head, refusals of bad HTTP.

The application sees complete request heads only. Before that the client has no key, so it gets
little memory and little time.
"""

import asyncio
import logging
from typing import cast

from fastapi import FastAPI
from typing_extensions import override
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from gateway.dependencies import Dependencies
from gateway.errors import GatewayError, InvalidRequest, RequestTimeout, RequestTooLarge
from gateway.http.error_responses import error_response

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 << 10  # the SDK sends one kilobyte; proxies stop at 8 to 32
HEAD_SECONDS = 30.0  # from the connection, or a head's first byte, to its last


class HttpConnection(HttpToolsProtocol):
    """One client's connection; `uvicorn` makes one for each that it accepts."""

    _head_bytes = 0  # of the head that is being read
    _reads_head = True
    _head_timer: asyncio.TimerHandle | None = None

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin_head()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        super().connection_lost(exc)

    @override
    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._reads_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(
                    RequestTooLarge(
                        f"Request head exceeds the maximum size: {MAX_HEAD_BYTES} bytes"
                    )
                )

    @override
    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begin_head()

    @override
    def on_headers_complete(self) -> None:
        self._end_head()
        super().on_headers_complete()

    @override
    def send_400_response(self, msg: str) -> None:
        self._refuse(InvalidRequest(msg))

    def _begin_head(self) -> None:
        self._end_head()
        self._reads_head = True
        self._head_timer = self.loop.call_later(
            HEAD_SECONDS,
            self._refuse,
            RequestTimeout(f"The request did not arrive within {HEAD_SECONDS:.0f} seconds"),
        )

    def _end_head(self) -> None:
        self._reads_head = False
        self._head_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, error: GatewayError) -> None:
        """Respond to what is not a valid request, and close."""
        self._end_head()
        if self.transport.is_closing():
            return
        cycle = cast("RequestResponseCycle | None", self.cycle)  # none before the first request
        if cycle is None or cycle.response_complete or not cycle.response_started:
            self.transport.write(self._error_response(error))
        # Else a response is being sent; an error in the middle of it would corrupt it.
        self.transport.close()

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
