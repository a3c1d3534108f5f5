"""Abort on disconnect: nothing is computed for a client that has closed its connection."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Receive

from gateway.requests.generation import Generation


@asynccontextmanager
async def abort_on_disconnect(generation: Generation, receive: Receive) -> AsyncIterator[None]:
    """Abandon the generation if the client closes or breaks its connection, or the block fails.

    The request's body must have been read: after it, `receive` returns only the disconnect. One
    with a `fault` (see `connection.py`) leaves the way to the client open, and it is told.
    """

    async def watch() -> None:
        while (message := await receive())["type"] != "http.disconnect":
            pass
        generation.abandon(message.get("fault"))

    watcher = asyncio.create_task(watch())
    try:
        yield
    except BaseException:
        generation.abandon()
        raise
    finally:
        watcher.cancel()
