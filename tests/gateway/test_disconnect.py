"""What a client that goes away, goes half away or sends garbage does to its running request."""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.gateway.stack import PATIENCE_SECONDS, Stack, complete, running_stack
from tests.gateway.talk import text, user

BODY = complete({"messages": [user(text(20, "u"))], "max_tokens": 5})
ENDLESS = BODY | {"max_tokens": 4_000}


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    with running_stack(tmp_path) as stack:
        yield stack
        stack.wait_until(lambda: stack.open_holds() == [])


@contextmanager
def sent(stack: Stack, body: dict[str, object], *, more: bytes = b"") -> Iterator[socket.socket]:
    """A connection on which the request was sent, and `more` in the same piece."""
    url = httpx.URL(stack.url)
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/messages HTTP/1.1\r\nhost: x\r\nx-api-key: {stack.key}\r\n"
        f"anthropic-version: 2023-06-01\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    with socket.create_connection((url.host, url.port), PATIENCE_SECONDS) as connection:
        connection.sendall(head.encode() + content + more)
        yield connection


def read_all(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(65_536), b""))


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    received = b""
    while mark not in received:
        received += connection.recv(65_536)
    return received


@pytest.mark.parametrize("stream", [False, True])
def test_a_half_closed_client_gets_its_whole_answer(stack: Stack, stream: bool) -> None:
    with sent(stack, BODY | {"stream": stream}) as connection:
        connection.shutdown(socket.SHUT_WR)
        received = read_all(connection)

    assert b"HTTP/1.1 200 " in received
    assert b"max_tokens" in received or b"end_turn" in received


def test_a_half_closed_client_that_has_gone_is_noticed_before_the_response(stack: Stack) -> None:
    with sent(stack, ENDLESS):
        stack.wait_until(lambda: stack.open_holds() != [])
        (request_id,) = stack.open_holds()

    stack.wait_until(lambda: stack.open_holds() == [])
    assert stack.record(request_id)["status"] == "aborted"


def test_garbage_behind_a_stream_ends_it_with_an_error_event(stack: Stack) -> None:
    with sent(stack, ENDLESS | {"stream": True}) as connection:
        received = read_until(connection, b"content_block_delta")
        connection.sendall(b"\x00 this is no HTTP \r\n\r\n")
        received += read_all(connection)

    last = received.split(b"event: ")[-1]
    assert last.startswith(b"error\n")
    assert b"invalid_request_error" in last
    assert received.endswith(b"0\r\n\r\n"), "the response is whole"


def test_a_request_sent_behind_does_not_keep_a_gone_clients_request_running(stack: Stack) -> None:
    behind = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"
    with sent(stack, ENDLESS | {"stream": True}, more=behind) as connection:
        read_until(connection, b"content_block_delta")

    stack.wait_until(lambda: stack.open_holds() == [])
