"""A connection that ends always ends, whatever its client does or does not do."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gateway.http import closing
from gateway.http.closing import ClosingTransport


class Ending(asyncio.Protocol):
    """Closes with this much to send, while its client is still sending or not."""

    def __init__(self, *, unsent: bytes, has_unread: bool) -> None:
        self.lost = asyncio.Event()
        self._unsent = unsent
        self._has_unread = has_unread

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = ClosingTransport(
            transport, loop=asyncio.get_running_loop(), has_unread=lambda: self._has_unread
        )
        self.transport.write(self._unsent)
        self.transport.close()

    def data_received(self, data: bytes) -> None:
        self.transport.drop(len(data))

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport.end()
        self.lost.set()


@contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    with ours, theirs:
        yield ours, theirs


async def connect(ours: socket.socket, *, unsent: bytes, has_unread: bool = False) -> Ending:
    _, ending = await asyncio.get_running_loop().connect_accepted_socket(
        lambda: Ending(unsent=unsent, has_unread=has_unread), ours
    )
    return ending


async def test_a_client_that_reads_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closing, "FLUSH_SECONDS", 0.01)
    with pair() as (ours, _):
        ending = await connect(ours, unsent=b"x" * 10_000_000)

        async with asyncio.timeout(5):
            await ending.lost.wait()


async def test_a_client_that_reads_gets_everything() -> None:
    loop = asyncio.get_running_loop()
    with pair() as (ours, theirs):
        await connect(ours, unsent=b"x" * 1_000_000)

        received = 0
        while data := await loop.sock_recv(theirs, 65_536):
            received += len(data)

    assert received == 1_000_000


async def test_while_the_client_sends_the_connection_lingers_and_then_closes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(closing, "LINGER_SILENCE_SECONDS", 0.02)
    loop = asyncio.get_running_loop()
    with pair() as (ours, theirs):
        ending = await connect(ours, unsent=b"sorry", has_unread=True)
        await loop.sock_sendall(theirs, b"x" * 100_000)

        assert await loop.sock_recv(theirs, 10) == b"sorry"
        assert await loop.sock_recv(theirs, 10) == b"", "the server's end is sent at once"
        async with asyncio.timeout(5):
            await ending.lost.wait()


async def test_what_is_dropped_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closing, "LINGER_BYTES", 1_000)
    with pair() as (ours, theirs):
        ending = await connect(ours, unsent=b"sorry", has_unread=True)
        theirs.send(b"x" * 2_000)

        async with asyncio.timeout(5):
            await ending.lost.wait()
