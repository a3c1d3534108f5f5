"""What the load client makes of a server's stream."""

import asyncio
import json
from typing import Any

import pytest

from bench.chat_client import ChatRequest, Target, send
from bench.errors import BenchError
from bench.peers import peer_ports

USAGE = {"type": "message_delta", "usage": {"input_tokens": 3, "output_tokens": 1}}
TEXT = {"type": "content_block_delta", "index": 0}


async def reply_to(*events: dict[str, Any]) -> Any:
    """Send one request to a server that streams these events."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
        for event in events:
            writer.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        target = Target("peer", f"http://127.0.0.1:{port}", "anthropic", "m")
        return await send(target, ChatRequest("Hi", 1))


async def test_an_answer_of_a_special_token_alone_is_an_answer() -> None:
    reply = await reply_to(USAGE)

    assert reply.timing.output_tokens == 1
    assert reply.timing.ttft_ms == reply.timing.e2el_ms > 0


async def test_each_piece_of_text_has_its_arrival() -> None:
    assert len((await reply_to(TEXT, TEXT, USAGE)).timing.arrivals_s) == 2


async def test_a_stream_without_usage_is_no_measurement() -> None:
    with pytest.raises(BenchError, match="without usage"):
        await reply_to(TEXT)


def test_the_ports_of_peers_are_read_from_their_addresses() -> None:
    class Options:
        peer = ("a=http://127.0.0.1:8000", "b=anthropic+http://localhost:8081", "c=http://x")

    assert peer_ports(Options()) == [8000, 8081, 80]  # type: ignore[arg-type]
