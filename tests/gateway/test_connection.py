"""The server's own answers, over real sockets: to what never becomes a request."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gateway.app import create_app
from gateway.http import connection
from gateway.http.connection import MAX_HEAD_BYTES
from gateway.http.http_server import listening, serve
from tests.gateway.front import front

HEALTH = b"GET /healthz HTTP/1.1\r\nhost: x\r\n"


class Line:
    """One connection to a served gateway."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def ask(self, *pieces: bytes) -> tuple[bytes, bytes]:
        """Send, and return head and body of all that comes back until the end."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        finally:
            writer.close()
        return head, body


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[Line]:
    async def drain() -> None:
        pass

    async with front(folder) as gateway:
        stop = asyncio.Event()
        with listening("127.0.0.1", 0) as listener:
            app = create_app(gateway.deps)
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
