"""One client's connection, seen from the server: bytes in and out, never blocking."""

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

# More than any kernel buffers for a connection: what a dead client had sent is read in one turn,
# and a client that never stops sending still leaves the loop its turn.
MAX_READ_BYTES = 8 << 20
# About a minute of events for a thousand streams; a client that far behind is not reading.
MAX_UNSENT_BYTES = 16 << 20
_CHUNK_BYTES = 256 << 10


class ClientSocket:
    """A connected client. `request_ids` are its requests that have not ended."""

    def __init__(self, connection: socket.socket) -> None:
        """Take over an accepted connection."""
        connection.setblocking(False)
        self.connection = connection
        self.request_ids: set[str] = set()
        self.ended = False
        self._greeted = False
        self._frames = FrameReader(ClientMessage)
        self._unsent = bytearray()

    def receive(self) -> Iterator[ClientMessage]:
        """Yield every message that has arrived; the first one must be Hello.

        Sets `ended` when the client is gone. Raises FrameError for what is not a message.
        """
        num_read = 0
        while num_read < MAX_READ_BYTES:
            try:
                data = self.connection.recv(_CHUNK_BYTES)
            except BlockingIOError:
                return
            except OSError:  # reset, timed out: as gone as after an orderly end
                data = b""
            if not data:
                self.ended = True
                return
            num_read += len(data)
            for message in self._frames.feed(data):
                self._check_greeting(message)
                yield message

    def send(self, message: EngineMessage) -> None:
        """Queue a frame and send what the connection takes now.

        Sets `ended` when the client is gone or does not read.
        """
        self._unsent += encode_engine(message)
        self.send_unsent()

    def send_unsent(self) -> None:
        """Send what the connection takes of the frames that wait."""
        try:
            while self._unsent and not self.ended:
                del self._unsent[: self.connection.send(self._unsent[:_CHUNK_BYTES])]
        except BlockingIOError:
            self.ended = len(self._unsent) > MAX_UNSENT_BYTES
        except OSError:
            self.ended = True

    @property
    def is_open(self) -> bool:
        """Whether the client has said hello and has not gone."""
        return self._greeted and not self.ended

    @property
    def has_unsent(self) -> bool:
        """Whether frames wait for the connection to take more."""
        return bool(self._unsent)

    def refuse(self, reason: str) -> None:
        """Say why, and end the link."""
        self.send(Fault(reason))
        self.ended = True

    def close(self) -> None:
        """Close the connection; frames already taken by the kernel still arrive."""
        self.ended = True
        with contextlib.suppress(OSError):  # the client went first
            self.connection.shutdown(socket.SHUT_WR)
        self.connection.close()

    def _check_greeting(self, message: ClientMessage) -> None:
        if isinstance(message, Hello) == self._greeted:
            raise FrameError("A link opens with one hello.")
        if isinstance(message, Hello) and message.version != PROTOCOL_VERSION:
            raise FrameError(f"This engine speaks version {PROTOCOL_VERSION}: {message.version}")
        self._greeted = True
