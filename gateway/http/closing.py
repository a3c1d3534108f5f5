"""The end of a connection: what is unsent gets a limited time, and so does what is unread.

A socket that is closed while it holds unread bytes resets the connection, and the client loses the
response. So a connection that ends before its request has arrived lingers: it sends its end and
drops what still comes. Every close is bounded: a client that reads nothing is cut off.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from typing_extensions import override

LINGER_SECONDS = 30.0  # for all of what is dropped; nginx's lingering_time
LINGER_SILENCE_SECONDS = 5.0  # nginx's lingering_timeout
LINGER_BYTES = 64_000_000  # two bodies of the largest size
FLUSH_SECONDS = 30.0  # in which a client must read something of what is unsent
FLUSHES = 10  # such periods, 5 minutes, for a slow but steady client


class ClosingTransport(asyncio.Transport):
    """A connection's transport, whose `close` always comes to an end.

    `has_unread` tells whether the client is still sending; then `close` lingers.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        *,
        loop: asyncio.AbstractEventLoop,
        has_unread: Callable[[], bool],
    ) -> None:
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._has_unread = has_unread
        self._is_closing = False
        self._timer: asyncio.TimerHandle | None = None
        self._linger_until = 0.0
        self._dropped_bytes = 0

    @override
    def close(self) -> None:
        """Close once what is unsent has left; linger first if the client is still sending."""
        if self._is_closing:
            return
        self._is_closing = True
        if self._transport.is_closing() or not self._has_unread():
            self.close_now()
            return
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._linger_until = self._loop.time() + LINGER_SECONDS
        self._await_silence()

    def drop(self, num_bytes: int) -> None:
        """Account for bytes that arrived too late; past the limit, stop reading them."""
        self._dropped_bytes += num_bytes
        if self._dropped_bytes > LINGER_BYTES:
            self.abort()
        elif self._is_closing and not self._transport.is_closing():
            self._await_silence()

    def close_now(self) -> None:
        """Close without lingering."""
        self._is_closing = True
        self._transport.close()
        self._check_flush(periods_left=FLUSHES, unsent=self.get_write_buffer_size())

    def end(self) -> None:
        """The connection is lost: no timer is left behind."""
        self._is_closing = True
        self._set_timer(None)

    @override
    def abort(self) -> None:
        self._is_closing = True
        self._set_timer(None)
        self._transport.abort()

    @override
    def is_closing(self) -> bool:
        return self._is_closing or self._transport.is_closing()

    def _await_silence(self) -> None:
        left = min(LINGER_SILENCE_SECONDS, self._linger_until - self._loop.time())
        self._set_timer(self._loop.call_later(left, self.close_now))

    def _check_flush(self, *, periods_left: int, unsent: int) -> None:
        def check() -> None:
            left = self.get_write_buffer_size()
            if periods_left == 0 or left >= unsent:
                self.abort()
            else:
                self._check_flush(periods_left=periods_left - 1, unsent=left)

        self._set_timer(self._loop.call_later(FLUSH_SECONDS, check) if unsent else None)

    def _set_timer(self, timer: asyncio.TimerHandle | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer

    @override
    def write(self, data: "bytes | bytearray | memoryview[Any]") -> None:
        if not self._is_closing:
            self._transport.write(data)

    @override
    def pause_reading(self) -> None:
        self._transport.pause_reading()

    @override
    def resume_reading(self) -> None:
        self._transport.resume_reading()

    @override
    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    @override
    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size()
