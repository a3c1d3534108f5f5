"""Request bodies: read within a limit of size, of time, and of what all bodies take in memory."""

import asyncio
import contextlib
from functools import partial

from fastapi import Request

from gateway.errors import InvalidRequest, Overloaded, RequestTimeout, RequestTooLarge
from gateway.http.body_bytes import TOO_MANY, BodyInFlight

MAX_BODY_BYTES = 32_000_000  # the API's own limit for messages
BODY_WAIT_SECONDS = 300  # 32 MB over a slow line; a client that sends nothing must not stay


async def read_bytes(
    request: Request,
    in_flight: BodyInFlight,
    *,
    max_bytes: int = MAX_BODY_BYTES,
    wait_seconds: float = BODY_WAIT_SECONDS,
) -> bytearray:
    """Return the whole body; refuse it as early as can be known.

    Raises InvalidRequest for a content encoding, RequestTooLarge past `max_bytes`, RequestTimeout
    after `wait_seconds`, Overloaded if `in_flight` finds no room.
    """
    _require_identity(request.headers.get("content-encoding"))
    _require_size(int(request.headers.get("content-length", 0)), max_bytes=max_bytes)
    body = bytearray()  # it grows in place: joining 32 MB at once would stop the event loop
    try:
        async with asyncio.timeout(wait_seconds) as limit:
            in_flight.on_evicted = partial(_end_now, limit)
            async for chunk in request.stream():
                _require_size(len(body) + len(chunk), max_bytes=max_bytes)
                in_flight.take(len(chunk))
                body += chunk
    except TimeoutError:
        if in_flight.is_evicted:
            raise Overloaded(TOO_MANY) from None
        raise RequestTimeout(f"The body did not arrive within {wait_seconds} seconds") from None
    finally:
        in_flight.on_evicted = None
    return body


def _end_now(limit: asyncio.Timeout) -> None:
    with contextlib.suppress(RuntimeError):  # it has ended in this turn of the loop
        limit.reschedule(asyncio.get_running_loop().time())


def _require_size(num_bytes: int, *, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise RequestTooLarge(f"Request exceeds the maximum size: {max_bytes} bytes")


def _require_identity(encoding: str | None) -> None:
    if encoding is not None and encoding.strip().lower() not in ("", "identity"):
        raise InvalidRequest(
            f"content-encoding: Send the body uncompressed, not as: {encoding}",
            error_code="request_body_encoding_unsupported",
        )
