"""Abort on disconnect: nothing is computed for a client that has closed its connection."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Receive

from gateway.requests.generation import Generation


@asynccontextmanager
async def abort_on_disconnect(generation: Generation, receive: Receive) -> AsyncIterator[None]:
    """Abandon the generation if the client closes its connection, or if the block fails.

    The request's body must have been read: after it, `receive` returns the disconnect, or what the
    client sent though it had nothing more to send.
    """

    async def watch() -> None:
        await receive()  # a disconnect, or bytes beyond the request: garbage
        generation.abandon()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except BaseException:
        generation.abandon()
        raise
    finally:
        watcher.cancel()
