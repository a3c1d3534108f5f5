"""One client's non-blocking socket on the server: frames in, frames out, both bounded."""

import contextlib
import socket
from collections.abc import Iterator

from engine.errors import FrameError
from engine.link.frames import (
    ClientMessage,
    EngineMessage,
    Fault,
    FrameReader,
    Hello,
    encode_engine,
)
from engine.protocol import PROTOCOL_VERSION

# More than any kernel buffers for a socket, so all that a dead client sent is read in one turn; and
# a bound, so a client that never stops sending does not block the loop.
MAX_READ_BYTES = 8 << 20
# About a minute of events of a thousand streams; a client this far behind is not reading.
MAX_UNSENT_BYTES = 16 << 20
_CHUNK_BYTES = 256 << 10


class ClientSocket:
    """A connected client; `request_ids` are its requests that have not ended."""

    def __init__(self, connection: socket.socket, *, opened_ms: int = 0) -> None:
        """Own a socket that was accepted at `opened_ms`."""
        connection.setblocking(False)
        self.connection = connection
        self.opened_ms = opened_ms
        self.request_ids: set[str] = set()
        self.ended = False
        self._greeted = False
        self._frames = FrameReader(ClientMessage)
        self._unsent = bytearray()

    def receive(self) -> Iterator[ClientMessage]:
        """Yield every message that has arrived; the first one must be Hello.

        Sets `ended` when the client has disconnected. Raises FrameError for an invalid frame.
        """
        num_read = 0
        while num_read < MAX_READ_BYTES:
            try:
                data = self.connection.recv(_CHUNK_BYTES)
            except BlockingIOError:
                return
            except OSError:  # reset or timed out: treated like an orderly end
                data = b""
            if not data:
                self.ended = True
                return
            num_read += len(data)
            for message in self._frames.feed(data):
                self._check_greeting(message)
                yield message

    def send(self, message: EngineMessage) -> None:
        """Queue a frame and send what the socket takes without blocking.

        Sets `ended` when the client has disconnected or has MAX_UNSENT_BYTES unread, and after a
        Fault when the message is longer than a frame.
        """
        try:
            self._unsent += encode_engine(message)
        except FrameError as error:
            self._unsent += encode_engine(Fault(f"A reply cannot be sent. {error}"))
            self.send_unsent()
            self.ended = True
            return
        self.send_unsent()

    def send_unsent(self) -> None:
        """Send what the socket takes of the queued frames."""
        try:
            while self._unsent and not self.ended:
                del self._unsent[: self.connection.send(self._unsent[:_CHUNK_BYTES])]
        except BlockingIOError:
            self.ended = len(self._unsent) > MAX_UNSENT_BYTES
        except OSError:
            self.ended = True

    @property
    def is_open(self) -> bool:
        """Whether the client has sent Hello and the link has not ended."""
        return self._greeted and not self.ended

    @property
    def has_unsent(self) -> bool:
        """Whether queued frames remain to be sent."""
        return bool(self._unsent)

    def refuse(self, reason: str) -> None:
        """Send a Fault with the reason and end the link."""
        self.send(Fault(reason))
        self.ended = True

    def close(self) -> None:
        """Close the socket; frames that the kernel has already taken are still delivered."""
        self.ended = True
        with contextlib.suppress(OSError):  # the client closed first
            self.connection.shutdown(socket.SHUT_WR)
        self.connection.close()

    def _check_greeting(self, message: ClientMessage) -> None:
        if isinstance(message, Hello) == self._greeted:
            raise FrameError("A link opens with one hello.")
        if isinstance(message, Hello) and message.version != PROTOCOL_VERSION:
            raise FrameError(f"This engine speaks version {PROTOCOL_VERSION}: {message.version}")
        self._greeted = True
