"""The server's own answers, over real sockets: to what never becomes a request."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from sqlalchemy import Connection

from billing.customers import create_key, create_organization
from gateway.app import create_app
from gateway.http import closing, connection, http_server
from gateway.http.connection import MAX_PIPELINED
from gateway.http.http_server import listening, serve
from gateway.http.read_limits import MAX_HEAD_BYTES, MAX_HEADERS
from tests.gateway.front import KEY, NOW_MS, front

POST = b"POST /v1/messages HTTP/1.1\r\nhost: x\r\n"
KEY_HEADERS = b"x-api-key: %b\r\nanthropic-version: 2023-06-01\r\n" % KEY.encode()
HEALTH = b"GET /healthz HTTP/1.1\r\nhost: x\r\n"


class Line:
    """One connection to a served gateway."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self._port)

    async def ask(self, *pieces: bytes) -> tuple[bytes, bytes]:
        """Send, and return head and body of all that comes back until the end."""
        reader, writer = await self.open()
        try:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        finally:
            writer.close()
        return head, body


@asynccontextmanager
async def served(
    folder: Path, *, found: Callable[[Connection], None] | None = None, **settings: int
) -> AsyncIterator[Line]:
    async def drain() -> None:
        pass

    async with front(folder, **settings) as gateway:
        if found is not None:
            gateway.deps.database.write_now(found)
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
        POST + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        HEALTH + b"x-a: 1\x00\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\n\r\n",
        HEALTH + b"host: y\r\n\r\n",
    ],
)
async def test_what_is_no_http_is_refused_in_the_one_shape(tmp_path: Path, data: bytes) -> None:
    async with served(tmp_path) as line:
        assert_refused(*await line.ask(data), 400, "invalid_request_error")


async def test_a_head_without_end_is_refused(tmp_path: Path) -> None:
    async with served(tmp_path) as line:
        answer = await line.ask(HEALTH + b"x-a: ", b"a" * MAX_HEAD_BYTES)

    assert "head exceeds" in assert_refused(*answer, 413, "request_too_large")


def head_of(num_bytes: int) -> bytes:
    """A head of exactly so many bytes, whose response ends the connection."""
    start, end = HEALTH + b"connection: close\r\nx-a: ", b"\r\n\r\n"
    return start + b"a" * (num_bytes - len(start) - len(end)) + end


@pytest.mark.parametrize("pieces", [1, 2, 1000])
async def test_a_head_has_one_limit_however_it_comes(tmp_path: Path, pieces: int) -> None:
    async with served(tmp_path) as line:
        for num_bytes, status in ((MAX_HEAD_BYTES, b"200"), (MAX_HEAD_BYTES + 1, b"413")):
            data = head_of(num_bytes)
            step = -(-len(data) // pieces)
            head, _ = await line.ask(*(data[i : i + step] for i in range(0, len(data), step)))

            assert head.startswith(b"HTTP/1.1 " + status), head


async def test_a_pipelined_head_over_the_limit_ends_the_connection(tmp_path: Path) -> None:
    async with served(tmp_path) as line:
        head, rest = await line.ask(HEALTH + b"\r\n" + head_of(MAX_HEAD_BYTES + 100))

    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1 " not in rest


async def test_a_head_has_so_many_fields_and_no_more(tmp_path: Path) -> None:
    fields = b"x: 1\r\n" * MAX_HEADERS
    async with served(tmp_path) as line:
        answer = await line.ask(HEALTH + fields + b"\r\n")

    assert "100 header fields" in assert_refused(*answer, 413, "request_too_large")


async def test_http_1_0_needs_no_host(tmp_path: Path) -> None:
    async with served(tmp_path) as line:
        head, _ = await line.ask(b"GET /healthz HTTP/1.0\r\n\r\n")

    assert head.startswith(b"HTTP/1.1 200 ")


CHUNKED = POST + KEY_HEADERS + b"transfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "endless",
    [
        b"0\r\n" + b"x-t: 1\r\n" * 20_000,
        b"0\r\nx-t: " + b"1" * 200_000,
        b"1;" + b"e" * 200_000,
    ],
    ids=["many trailers", "one long trailer", "a chunk extension"],
)
async def test_trailers_without_end_are_counted_and_cut(tmp_path: Path, endless: bytes) -> None:
    async with served(tmp_path) as line:
        answer = await line.ask(CHUNKED, endless)

    assert "maximum size" in assert_refused(*answer, 413, "request_too_large")


async def test_a_trailer_is_no_header(tmp_path: Path) -> None:
    trailer = b"0\r\nx-api-key: " + KEY.encode() + b"\r\n\r\n"
    async with served(tmp_path) as line:
        head, _ = await line.ask(
            POST + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n", trailer
        )

    assert head.startswith(b"HTTP/1.1 401 ")


async def test_an_early_refusal_closes(tmp_path: Path) -> None:
    async with served(tmp_path) as line:
        answer = await line.ask(POST + b"content-length: 1000000000\r\n\r\n")

    assert_refused(*answer, 401, "authentication_error")


async def test_a_body_that_says_it_is_too_long_is_refused_unread(tmp_path: Path) -> None:
    async with served(tmp_path) as line:
        answer = await line.ask(POST + KEY_HEADERS + b"content-length: 32000001\r\n\r\n")

    assert_refused(*answer, 413, "request_too_large")


async def test_a_customer_without_balance_is_refused_before_its_body_comes(tmp_path: Path) -> None:
    def found(conn: Connection) -> None:
        create_organization(conn, id="org_poor", name="Poor", mode="prepaid", now_ms=NOW_MS)
        create_key(
            conn,
            id="key_poor",
            secret="kv-poor",
            organization_id="org_poor",
            name="poor",
            kind="customer",
            now_ms=NOW_MS,
        )

    async with served(tmp_path, found=found) as line:
        answer = await line.ask(
            POST + KEY_HEADERS.replace(KEY.encode(), b"kv-poor") + b"content-length: 100\r\n\r\n"
        )

    assert_refused(*answer, 402, "billing_error")


async def test_what_comes_after_an_early_refusal_is_dropped_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(closing, "LINGER_SILENCE_SECONDS", 0.05)
    async with served(tmp_path) as line:
        reader, writer = await line.open()
        writer.write(POST + b"content-length: 1000000000\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.read()  # the server's end
        with pytest.raises(ConnectionError):  # the server has closed: what is sent is reset
            await send_for_ever(writer)
        writer.close()

    assert head.startswith(b"HTTP/1.1 401 ")


async def send_for_ever(writer: asyncio.StreamWriter) -> None:
    """Send a byte now and then, more rarely than the server's patience lasts."""
    while True:
        await asyncio.sleep(0.1)
        writer.write(b"x")
        await writer.drain()


async def test_a_kept_connection_that_sends_no_request_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "IDLE_SECONDS", 0.1)
    async with served(tmp_path) as line:
        reader, writer = await line.open()
        writer.write(HEALTH + b"\r\n")
        await reader.readuntil(b'"ok"}')
        writer.write(b"\r\n")  # between requests a parser skips it

        assert await reader.read() == b""
        writer.close()


async def test_an_address_has_so_many_connections(tmp_path: Path) -> None:
    async with served(tmp_path, max_connections_per_address=2) as line:
        first, second = await line.open(), await line.open()
        await asyncio.sleep(0)
        assert_refused(*await line.ask(HEALTH + b"\r\n"), 529, "overloaded_error")
        for _, writer in (first, second):
            writer.write(HEALTH + b"connection: close\r\n\r\n")
        for reader, writer in (first, second):
            assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
            writer.close()


@pytest.mark.parametrize("count", [1, 2])
async def test_a_half_closed_client_is_answered(tmp_path: Path, count: int) -> None:
    async with served(tmp_path) as line:
        reader, writer = await line.open()
        writer.write((HEALTH + b"\r\n") * count)
        writer.write_eof()
        received = await reader.read()
        writer.close()

    assert received.count(b"HTTP/1.1 200 ") == count
    assert received.endswith(b'"ok"}')


async def test_a_body_that_ends_too_early_is_refused(tmp_path: Path) -> None:
    async with served(tmp_path) as line:
        reader, writer = await line.open()
        writer.write(POST + KEY_HEADERS + b"content-length: 5\r\n\r\nab")
        writer.write_eof()
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()

    assert "before its body" in assert_refused(head, body, 400, "invalid_request_error")


async def test_requests_beyond_those_that_may_wait_are_refused(tmp_path: Path) -> None:
    async with served(tmp_path) as line:
        head, rest = await line.ask((HEALTH + b"\r\n") * (MAX_PIPELINED + 2))

    assert (head + rest).count(b"HTTP/1.1 ") == 1


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
