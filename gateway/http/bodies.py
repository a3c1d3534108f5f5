"""Reading a request's body: at most so long, not compressed."""

import asyncio

from fastapi import Request

from gateway.errors import InvalidRequest, RequestTimeout, RequestTooLarge

MAX_BODY_BYTES = 32_000_000  # the API's own limit for messages
MAX_DRAINED_BYTES = 2 * MAX_BODY_BYTES  # what we read of a body that is too long, see below
BODY_WAIT_SECONDS = 300  # 32 MB over a slow line; a client that sends nothing must not stay


async def read_bytes(
    request: Request,
    *,
    max_bytes: int = MAX_BODY_BYTES,
    wait_seconds: float = BODY_WAIT_SECONDS,
) -> bytes:
    """The whole body.

    A body that is too long is read on for a while and thrown away: a client that is still sending
    when the connection closes sees a broken pipe instead of our answer.

    Raises InvalidRequest for a content encoding, RequestTooLarge past `max_bytes`, RequestTimeout
    after `wait_seconds`.
    """
    _require_identity(request.headers.get("content-encoding"))
    chunks = []
    size = 0
    try:
        async with asyncio.timeout(wait_seconds):
            async for chunk in request.stream():
                size += len(chunk)
                if size <= max_bytes:
                    chunks.append(chunk)
                if size > MAX_DRAINED_BYTES:
                    break
    except TimeoutError:
        raise RequestTimeout(f"The body did not arrive within {wait_seconds} seconds") from None
    if size > max_bytes:
        raise RequestTooLarge(f"Request exceeds the maximum size: {max_bytes} bytes")
    return b"".join(chunks)


def _require_identity(encoding: str | None) -> None:
    if encoding is not None and encoding.strip().lower() not in ("", "identity"):
        raise InvalidRequest(
            f"content-encoding: Send the body uncompressed, not as: {encoding}",
            error_code="request_body_encoding_unsupported",
        )
