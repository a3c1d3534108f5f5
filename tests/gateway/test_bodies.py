import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.requests import Request
from starlette.types import Message

from gateway.errors import InvalidRequest, Overloaded, RequestTimeout, RequestTooLarge
from gateway.http.bodies import read_bytes
from gateway.http.body_bytes import BodyBytes


class Upload:
    """A client that sends chunks, and counts those taken."""

    def __init__(self, chunks: Iterator[bytes], **headers: str) -> None:
        self._chunks = chunks
        self.taken = 0
        pairs = [(name.replace("_", "-").encode(), v.encode()) for name, v in headers.items()]
        self.request = Request({"type": "http", "headers": pairs}, self._receive)

    async def _receive(self) -> Message:
        chunk = next(self._chunks, None)
        self.taken += chunk is not None
        return {"type": "http.request", "body": chunk or b"", "more_body": chunk is not None}


async def read(upload: Upload, **limits: Any) -> bytes:
    with BodyBytes().body("org") as in_flight:
        return await read_bytes(upload.request, in_flight, **limits)


async def test_a_body_at_the_limit_is_whole() -> None:
    assert await read(Upload(iter([b"ab", b"cd"])), max_bytes=4) == b"abcd"


async def test_a_body_past_the_limit_is_refused_at_once() -> None:
    upload = Upload(iter([b"ab", b"cd", b"ef", b"gh"]))

    with pytest.raises(RequestTooLarge, match="4 bytes"):
        await read(upload, max_bytes=4)
    assert upload.taken == 3


async def test_a_body_that_says_it_is_too_long_is_not_read() -> None:
    upload = Upload(iter([b"ab"]), content_length="5")

    with pytest.raises(RequestTooLarge, match="4 bytes"):
        await read(upload, max_bytes=4)
    assert upload.taken == 0


@pytest.mark.parametrize("encoding", ["gzip", "br", "zstd", "gzip, identity"])
async def test_a_compressed_body_is_refused(encoding: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await read(Upload(iter([b"{}"]), content_encoding=encoding))
    assert refused.value.error_code == "request_body_encoding_unsupported"


async def test_identity_is_no_compression() -> None:
    assert await read(Upload(iter([b"{}"]), content_encoding="Identity")) == b"{}"


class SilentUpload(Upload):
    """A client that sends one chunk and then nothing."""

    def __init__(self) -> None:
        super().__init__(iter([b"ab"]))
        self.is_silent = asyncio.Event()

    async def _receive(self) -> Message:
        if self.taken:
            self.is_silent.set()
            await asyncio.Event().wait()
        return await super()._receive()


async def test_a_body_that_never_comes_is_not_waited_for_for_ever() -> None:
    with pytest.raises(RequestTimeout):
        await read(SilentUpload(), wait_seconds=0)


async def test_a_slow_body_gives_way_to_a_customer_who_has_less() -> None:
    bodies, slow = BodyBytes(max_bytes=2), SilentUpload()
    with bodies.body("large") as large, bodies.body("small") as small:
        reading = asyncio.create_task(read_bytes(slow.request, large))
        await slow.is_silent.wait()

        small.take(1)

        with pytest.raises(Overloaded):
            await reading
        assert bodies.num_bytes == 1
