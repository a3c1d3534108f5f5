"""The server's own answers, over real sockets: to what never becomes a request."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from fastapi import Request

from gateway.app import create_app
from gateway.http import connection
from gateway.http.connection import MAX_HEAD_BYTES
from gateway.http.connection_limits import ConnectionLimits
from gateway.http.http_server import listening, serve
from tests.gateway.front import front

SLOW = b"POST /slow HTTP/1.1\r\nhost: x\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n\r\n1\r\nx\r\n"
HEALTH = b"GET /healthz HTTP/1.1\r\nhost: x\r\n"


class Line:
    """One connection to a served gateway."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self._port)

    async def ask(self, *pieces: bytes, half_close: bool = False) -> tuple[bytes, bytes]:
        """Send, and return head and body of all that comes back until the end."""
        reader, writer = await self.open()
        try:
            for piece in pieces:
                with suppress(ConnectionError):  # refused meanwhile
                    writer.write(piece)
                    await writer.drain()
            if half_close:
                writer.write_eof()
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        finally:
            writer.close()
        return head, body


@asynccontextmanager
async def served(folder: Path, *, slow_body: bool = False, **settings: int) -> AsyncIterator[Line]:
    """A served gateway; `slow_body` adds a route that reads its body and shows its headers."""

    async def drain() -> None:
        pass

    async def slow(request: Request) -> dict[str, str]:
        await request.body()
        await asyncio.sleep(0.05)
        return dict(request.headers)

    async with front(folder, **settings) as gateway:
        stop = asyncio.Event()
        with listening("127.0.0.1", 0) as listener:
            app = create_app(gateway.deps)
            if slow_body:
                app.post("/slow")(slow)
            serving = asyncio.create_task(serve(app, listener, stop=stop, drain=drain))
            try:
                yield Line(listener.getsockname()[1])
            finally:
                stop.set()
                await serving


def assert_refused(head: bytes, body: bytes, status: int, error_type: str) -> str:
    """Assert the one shape of errors on the wire; returns the message."""
    lines = head.split(b"\r\n")
    headers = dict(line.split(b": ", 1) for line in lines[1:])
    answer = json.loads(body)
    assert lines[0].startswith(b"HTTP/1.1 %d " % status)
    assert set(answer) == {"type", "error", "request_id"}
    assert answer["error"]["type"] == error_type
    assert headers[b"request-id"].decode() == answer["request_id"]
    assert headers[b"content-type"] == b"application/json"
    assert headers[b"connection"] == b"close"
    return str(answer["error"]["message"])


@pytest.mark.parametrize(
    "data",
    [
        b"FOO /v1/messages HTTP/1.1\r\nhost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET /v1/models/\xff HTTP/1.1\r\nhost: x\r\n\r\n",
        HEALTH + b"content-length: 1\r\ncontent-length: 2\r\n\r\n",
        HEALTH + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/messages HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        HEALTH + b"x-a: 1\x00\r\n\r\n",
    ],
)
async def test_what_is_no_http_is_refused_in_the_one_shape(tmp_path: Path, data: bytes) -> None:
    async with served(tmp_path) as line:
        assert_refused(*await line.ask(data), 400, "invalid_request_error")


async def test_a_head_without_end_is_refused(tmp_path: Path) -> None:
    async with served(tmp_path) as line:
        answer = await line.ask(HEALTH + b"x-a: ", b"a" * MAX_HEAD_BYTES)

    assert "head exceeds" in assert_refused(*answer, 413, "request_too_large")


async def test_a_head_that_does_not_come_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.01)
    async with served(tmp_path) as line:
        for begun in (b"", HEALTH):
            assert_refused(*await line.ask(begun), 408, "timeout_error")


async def test_an_upgrade_to_another_protocol_is_just_a_request(tmp_path: Path) -> None:
    upgrade = b"connection: upgrade, close\r\nupgrade: websocket\r\n\r\n"
    async with served(tmp_path) as line:
        head, body = await line.ask(HEALTH + upgrade)

    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"request-id: req_" in head
    assert json.loads(body) == {"status": "ok"}


async def test_requests_in_one_piece_are_answered_one_by_one(tmp_path: Path) -> None:
    async with served(tmp_path) as line:
        head, rest = await line.ask(HEALTH + b"\r\n" + HEALTH + b"connection: close\r\n\r\n")

    assert head.startswith(b"HTTP/1.1 200 ")
    assert rest.count(b"HTTP/1.1 200 ") == 1


async def test_a_head_over_the_limit_is_refused_also_in_one_piece(tmp_path: Path) -> None:
    async with served(tmp_path) as line:
        answer = await line.ask(HEALTH + b"x-a: " + b"a" * MAX_HEAD_BYTES + b"\r\n\r\n")

    assert "head exceeds" in assert_refused(*answer, 413, "request_too_large")


async def test_http_1_1_without_a_host_is_refused(tmp_path: Path) -> None:
    async with served(tmp_path) as line:
        answer = await line.ask(b"GET /healthz HTTP/1.1\r\n\r\n")

    assert "host" in assert_refused(*answer, 400, "invalid_request_error")


REFUSED = b"POST /v1/messages HTTP/1.1\r\nhost: x\r\n"


@pytest.mark.parametrize("body", [b"content-length: 1000000000\r\n\r\nx", CHUNKED])
async def test_a_refusal_before_the_bodys_end_closes_whatever_the_client_still_sends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: bytes
) -> None:
    monkeypatch.setattr(connection, "LINGER_SECONDS", 0.05)
    async with served(tmp_path) as line:
        head, _ = await line.ask(REFUSED + body)  # returns once the server has closed

    assert head.startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize("extra", [b"0\r\nx: ", b"1;x="])
async def test_trailers_and_chunk_extensions_without_end_are_cut(
    tmp_path: Path, extra: bytes
) -> None:
    async with served(tmp_path, slow_body=True) as line:
        endless = [b"a" * 65_536] * 8
        answer = await line.ask(SLOW + b"transfer-encoding: chunked\r\n\r\n" + extra, *endless)

    assert "beside its body" in assert_refused(*answer, 413, "request_too_large")


async def test_trailers_are_not_kept(tmp_path: Path) -> None:
    async with served(tmp_path, slow_body=True) as line:
        head, body = await line.ask(
            SLOW + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx-late: 1\r\n\r\n"
        )

    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"x-late" not in body


async def test_a_client_that_has_closed_its_half_is_answered(tmp_path: Path) -> None:
    async with served(tmp_path, slow_body=True) as line:
        head, body = await line.ask(SLOW + b"content-length: 0\r\n\r\n", half_close=True)

    assert head.startswith((b"HTTP/1.1 102 ", b"HTTP/1.1 200 "))
    assert b"HTTP/1.1 200 " in head + body


async def test_a_body_that_ends_too_early_is_refused(tmp_path: Path) -> None:
    async with served(tmp_path, slow_body=True) as line:
        answer = await line.ask(SLOW + b"content-length: 5\r\n\r\nab", half_close=True)

    assert "before its body" in assert_refused(*answer, 400, "invalid_request_error")


async def test_one_connection_too_many_is_refused_and_its_place_is_free_again(
    tmp_path: Path,
) -> None:
    async with served(tmp_path, max_connections_per_address=1) as line:
        _reader, writer = await line.open()
        answer = await line.ask(HEALTH + b"\r\n")
        assert "connections" in assert_refused(*answer, 529, "overloaded_error")
        writer.close()
        await writer.wait_closed()

        for _ in range(3):
            head, _ = await line.ask(HEALTH + b"connection: close\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")


def test_connections_are_counted_in_all_and_for_each_address() -> None:
    limits = ConnectionLimits(max_total=3, max_per_address=2)

    assert [limits.add(address) for address in ("a", "a", "a", "b", "c")] == [
        True,
        True,
        False,
        True,
        False,
    ]
    limits.remove("a")
    assert limits.add("c")
