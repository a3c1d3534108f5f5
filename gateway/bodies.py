"""Reading a request's body: at most so long, not compressed."""

from fastapi import Request

from gateway.errors import InvalidRequest, RequestTooLarge

MAX_BODY_BYTES = 32_000_000  # the API's own limit for messages
MAX_DRAINED_BYTES = 2 * MAX_BODY_BYTES  # what we read of a body that is too long, see below


async def read_bytes(request: Request, *, max_bytes: int = MAX_BODY_BYTES) -> bytes:
    """The whole body.

    A body that is too long is read on for a while and thrown away: a client that is still sending
    when the connection closes sees a broken pipe instead of our answer.

    Raises InvalidRequest for a content encoding, RequestTooLarge past `max_bytes`.
    """
    _require_identity(request.headers.get("content-encoding"))
    chunks = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= max_bytes:
            chunks.append(chunk)
        else:
            chunks.clear()
        if size > MAX_DRAINED_BYTES:
            break
    if size > max_bytes:
        raise RequestTooLarge(f"Request exceeds the maximum size: {max_bytes} bytes")
    return b"".join(chunks)


def _require_identity(encoding: str | None) -> None:
    if encoding is not None and encoding.strip().lower() not in ("", "identity"):
        raise InvalidRequest(
            f"content-encoding: Send the body uncompressed, not as: {encoding}",
            error_code="request_body_encoding_unsupported",
        )
