"""A small streaming client of the Anthropic and OpenAI chat APIs that uses little processor time.

Raw HTTP/1.1 over asyncio, one connection a request: a client on the same two cores takes what it
spends on parsing from the server that it measures.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal
from urllib.parse import urlsplit

from bench.errors import BenchError
from bench.timing import Timing

Api = Literal["anthropic", "openai"]
PATHS: dict[Api, str] = {"anthropic": "/v1/messages", "openai": "/v1/chat/completions"}
REQUEST_SECONDS = 1_800


@dataclass(frozen=True, slots=True)
class Target:
    """A server to measure."""

    name: str
    url: str
    api: Api
    model: str
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A system text, with a `cache_control` marker if `mark`, and a user text."""

    user: str
    max_tokens: int
    system: str | None = None
    mark: bool = False


@dataclass(slots=True)
class ChatReply:
    """Times at the client, token counts from the server, and the server's request id."""

    timing: Timing
    request_id: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0


async def send(target: Target, request: ChatRequest) -> ChatReply:
    """Send one streamed request. Raises BenchError unless the response is complete."""
    parts = urlsplit(target.url)
    body = json.dumps(_body(target, request)).encode()
    reply = ChatReply(Timing(perf_counter()))
    async with asyncio.timeout(REQUEST_SECONDS):
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80)
        try:
            writer.write(_head(target, parts.netloc, len(body)) + body)
            headers = await _read_head(reader, target)
            reply.request_id = headers.get("request-id", "")
            async for line in _lines(_chunks(reader, headers)):
                if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                    _take(target.api, json.loads(line[5:]), reply)
        finally:
            writer.close()
    if not reply.timing.output_tokens:
        raise BenchError(f"{target.name} responded without usage")
    if not reply.timing.arrivals_s:  # nothing but a special token, which has no text
        reply.timing.arrivals_s.append(perf_counter())
    return reply


async def send_all(
    target: Target, requests: Sequence[ChatRequest], *, at_once: int
) -> list[ChatReply]:
    """Send all in order, at most `at_once` at a time; return the replies in order."""
    gate = asyncio.Semaphore(at_once)

    async def one(request: ChatRequest) -> ChatReply:
        async with gate:
            return await send(target, request)

    return await asyncio.gather(*map(one, requests))


async def wall_seconds(
    work: Callable[[], Awaitable[list[ChatReply]]],
) -> tuple[float, list[ChatReply]]:
    """Return the wall seconds of the work, and its replies."""
    start_s = perf_counter()
    replies = await work()
    return perf_counter() - start_s, replies


def _body(target: Target, request: ChatRequest) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": target.model,
        "max_tokens": request.max_tokens,
        "stream": True,
        "temperature": 0,
    }
    user = {"role": "user", "content": request.user}
    if target.api == "anthropic":
        if request.system is not None:
            marked = {"cache_control": {"type": "ephemeral"}} if request.mark else {}
            body["system"] = [{"type": "text", "text": request.system, **marked}]
        return body | {"messages": [user]}
    system = [] if request.system is None else [{"role": "system", "content": request.system}]
    options = {"stream_options": {"include_usage": True}, "ignore_eos": True}
    return body | options | {"messages": [*system, user]}


def _head(target: Target, host: str, length: int) -> bytes:
    headers = {
        "host": host,
        "content-type": "application/json",
        "content-length": str(length),
        "connection": "close",
        **target.headers,
    }
    lines = [f"POST {PATHS[target.api]} HTTP/1.1", *(f"{k}: {v}" for k, v in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def _read_head(reader: asyncio.StreamReader, target: Target) -> dict[str, str]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    if head[0].split()[1] != "200":
        raise BenchError(f"{target.name}: {head[0]}: {(await reader.read(500)).decode()}")
    pairs = (line.split(":", 1) for line in head[1:] if line)
    return {name.lower(): value.strip() for name, value in pairs}


async def _chunks(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    """Yield the body without the chunked framing of HTTP."""
    if headers.get("transfer-encoding") != "chunked":
        while data := await reader.read(1 << 16):
            yield data
        return
    while size := int(await reader.readline(), 16):
        yield (await reader.readexactly(size + 2))[:-2]


async def _lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line


def _take(api: Api, event: dict[str, Any], reply: ChatReply) -> None:
    if "error" in event:
        raise BenchError(f"an error in the stream: {event['error']}")
    if api == "anthropic":
        _take_anthropic(event, reply)
    else:
        _take_openai(event, reply)


def _take_anthropic(event: dict[str, Any], reply: ChatReply) -> None:
    match event:
        case {"type": "content_block_delta"}:
            reply.timing.arrivals_s.append(perf_counter())
        case {"type": "message_delta", "usage": usage}:
            read = usage.get("cache_read_input_tokens") or 0
            written = usage.get("cache_creation_input_tokens") or 0
            reply.prompt_tokens = (usage.get("input_tokens") or 0) + read + written
            reply.cached_tokens = read
            reply.timing.output_tokens = usage["output_tokens"]


def _take_openai(event: dict[str, Any], reply: ChatReply) -> None:
    if any(choice.get("delta", {}).get("content") for choice in event.get("choices") or ()):
        reply.timing.arrivals_s.append(perf_counter())
    if usage := event.get("usage"):
        reply.prompt_tokens = usage["prompt_tokens"]
        reply.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        reply.timing.output_tokens = usage["completion_tokens"]
