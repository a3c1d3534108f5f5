import asyncio
from collections.abc import Iterator

import pytest
from starlette.requests import Request
from starlette.types import Message

from gateway.errors import InvalidRequest, RequestTimeout, RequestTooLarge
from gateway.http.bodies import MAX_DRAINED_BYTES, read_bytes


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


async def test_a_body_at_the_limit_is_whole() -> None:
    upload = Upload(iter([b"ab", b"cd"]))

    assert await read_bytes(upload.request, max_bytes=4) == b"abcd"


async def test_a_body_past_the_limit_is_drained_and_refused() -> None:
    upload = Upload(iter([b"ab", b"cd", b"ef"]))

    with pytest.raises(RequestTooLarge, match="4 bytes"):
        await read_bytes(upload.request, max_bytes=4)
    assert upload.taken == 3, "the client has sent everything and listens"


async def test_an_endless_body_is_not_drained_for_ever() -> None:
    megabyte = b"x" * 1_000_000
    upload = Upload(megabyte for _ in range(1_000))

    with pytest.raises(RequestTooLarge):
        await read_bytes(upload.request, max_bytes=4)
    assert upload.taken == MAX_DRAINED_BYTES // 1_000_000 + 1


@pytest.mark.parametrize("encoding", ["gzip", "br", "zstd", "gzip, identity"])
async def test_a_compressed_body_is_refused(encoding: str) -> None:
    upload = Upload(iter([b"{}"]), content_encoding=encoding)

    with pytest.raises(InvalidRequest) as refused:
        await read_bytes(upload.request)
    assert refused.value.error_code == "request_body_encoding_unsupported"


async def test_identity_is_no_compression() -> None:
    assert await read_bytes(Upload(iter([b"{}"]), content_encoding="Identity").request) == b"{}"


async def test_a_body_that_never_comes_is_not_waited_for_for_ever() -> None:
    async def receive() -> Message:
        return await asyncio.Future[Message]()

    request = Request({"type": "http", "headers": []}, receive)

    with pytest.raises(RequestTimeout):
        await read_bytes(request, wait_seconds=0)
