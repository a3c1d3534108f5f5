"""The frames of the engine link: a 4-byte big-endian length, then one msgpack map.

Each side sends Hello first; the engine's Hello carries its info. Then each client frame has its
reply:

    Submit, Abort, Finish   events in StepFrames: one a scheduler step, with all events of the link
    Lookup                  Found, with the same `call`
    Recent                  RecentIds, with the same `call`
    Stats                   Gauges, with the same `call`
    Unpin                   Unpinned, with the same `call`
    anything else           Fault, and the end of the link

Reports of leases go to every link, unasked.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgpack

from engine.errors import FrameError
from engine.protocol import (
    PROTOCOL_VERSION,
    Admitted,
    Committed,
    EngineInfo,
    EngineRecord,
    Finished,
    GenerateRequest,
    LeaseReport,
    Rejected,
    Tokens,
)
from engine.wire import from_plain, to_plain

MAX_FRAME_BYTES = 64 << 20  # a prompt of 16 million tokens; a larger length is not of this protocol
_LENGTH_BYTES = 4


@dataclass(frozen=True, slots=True)
class Hello:
    """The first frame of each side; the engine's has `info`."""

    version: int = PROTOCOL_VERSION
    info: EngineInfo | None = None


@dataclass(frozen=True, slots=True)
class Submit:
    """Submit a request; its events follow in StepFrames."""

    request: GenerateRequest


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request of this link."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Finish:
    """End a request of this link at its `output_tokens`-th output token."""

    request_id: str
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Lookup:
    """Request the closed records of these requests, submitted over any link."""

    call: int
    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Recent:
    """Request the ids of the last requests that have a closed record."""

    call: int
    limit: int


@dataclass(frozen=True, slots=True)
class Stats:
    """Request gauges and counters."""

    call: int


@dataclass(frozen=True, slots=True)
class Unpin:
    """End leases by id, and all leases of these namespaces, in every tier."""

    call: int
    lease_ids: tuple[str, ...] = ()
    namespaces: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class StepFrame:
    """All events of one engine step for one link."""

    wire_tag = "step"
    events: tuple[Admitted | Committed | Tokens | Finished | Rejected, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """The reply to Lookup; None for a request that is queued or running."""

    call: int
    records: dict[str, EngineRecord | None]


@dataclass(frozen=True, slots=True)
class RecentIds:
    """The reply to Recent, newest first."""

    wire_tag = "recent_ids"
    call: int
    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Gauges:
    """The reply to Stats."""

    call: int
    gauges: dict[str, float]


@dataclass(frozen=True, slots=True)
class Unpinned:
    """The reply to Unpin, once no tier outside the KV pool holds data of the leases."""

    call: int
    num_leases: int


@dataclass(frozen=True, slots=True)
class Reports:
    """Reports of what leases have cost, sent to every link."""

    reports: tuple[LeaseReport, ...]


@dataclass(frozen=True, slots=True)
class Fault:
    """Why the engine ends this link; its last frame."""

    message: str


ClientMessage = Hello | Submit | Abort | Finish | Lookup | Recent | Stats | Unpin
EngineMessage = Hello | StepFrame | Found | RecentIds | Gauges | Unpinned | Reports | Fault


def encode_client(message: ClientMessage) -> bytes:
    """Return a client's message as one frame. Raises FrameError if it is too long."""
    return _framed(to_plain(ClientMessage, message))


def encode_engine(message: EngineMessage) -> bytes:
    """Return an engine's message as one frame. Raises FrameError if it is too long."""
    return _framed(to_plain(EngineMessage, message))


class FrameReader:
    """Splits a byte stream into the messages of one direction."""

    def __init__(self, union: Any) -> None:
        """`union` is ClientMessage or EngineMessage."""
        self._union = union
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Append bytes and yield each message that is now complete.

        Raises FrameError at an invalid frame; the stream cannot be read any further then.
        """
        self._buffer += data
        while (end := self._frame_end()) is not None:
            body = bytes(memoryview(self._buffer)[_LENGTH_BYTES:end])
            del self._buffer[:end]
            yield from_plain(self._union, _unpacked(body))

    def _frame_end(self) -> int | None:
        """Return the end of the first frame in the buffer, or None while it is incomplete."""
        if len(self._buffer) < _LENGTH_BYTES:
            return None
        length = int.from_bytes(self._buffer[:_LENGTH_BYTES], "big")
        if length > MAX_FRAME_BYTES:
            raise FrameError(f"Frame too long: {length} bytes")
        end = _LENGTH_BYTES + length
        return end if len(self._buffer) >= end else None


def _framed(data: Any) -> bytes:
    try:
        body: bytes = msgpack.packb(data)
    except (OverflowError, ValueError) as error:  # an integer past 64 bits, a lone surrogate
        raise FrameError(f"Cannot be framed: {error}") from None
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"Frame too long: {len(body)} bytes")
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


def _unpacked(body: bytes) -> Any:
    try:
        return msgpack.unpackb(body)
    except ValueError as error:  # the base class of all msgpack errors
        raise FrameError(f"Not a msgpack map: {error}") from None
