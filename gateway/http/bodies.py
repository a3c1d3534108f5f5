"""Request bodies: read within a size and a time limit, then validated as a wire model."""

import asyncio
from typing import TypeVar

from fastapi import Request
from pydantic import ValidationError

from gateway.errors import InvalidRequest, RequestTimeout, RequestTooLarge
from gateway.wire.request import UNKNOWN_FIELD, ApiVersion, PromptRequest

Body = TypeVar("Body", bound=PromptRequest)

MAX_BODY_BYTES = 32_000_000  # the API's own limit for messages
MAX_DRAINED_BYTES = 2 * MAX_BODY_BYTES  # what we read of a body that is too long, see below
BODY_WAIT_SECONDS = 300  # 32 MB over a slow line; a client that sends nothing must not stay


async def read_bytes(
    request: Request,
    *,
    max_bytes: int = MAX_BODY_BYTES,
    wait_seconds: float = BODY_WAIT_SECONDS,
) -> bytes:
    """Return the whole body.

    A body that is too long is read on for a while and dropped: a client that is still sending when
    the connection closes sees a broken pipe instead of the error.

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


def read_body(model: type[Body], body: bytes, *, version: ApiVersion) -> Body:
    """Validate a JSON body as this model under this API version.

    Raises InvalidRequest that names the first fault as `<path>: <what is wrong>`.

    The models bound the number of faults: a list stops at its first one, an object reports one
    unknown field. Otherwise a body with a fault every few bytes would fill the memory.
    """
    try:
        return model.model_validate_json(body, strict=True, context={"version": version})
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        unknown = fault.get("ctx", {}).get(UNKNOWN_FIELD)
        loc = fault["loc"] if unknown is None else (*fault["loc"], unknown)
        raise InvalidRequest(fault["msg"], path=".".join(map(str, loc)) or None) from None


def _require_identity(encoding: str | None) -> None:
    if encoding is not None and encoding.strip().lower() not in ("", "identity"):
        raise InvalidRequest(
            f"content-encoding: Send the body uncompressed, not as: {encoding}",
            error_code="request_body_encoding_unsupported",
        )
