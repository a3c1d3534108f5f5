"""Answering while the client is watched: nothing is computed for one that has gone."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Receive

from gateway.requests.generation import Generation


@asynccontextmanager
async def attended(generation: Generation, receive: Receive) -> AsyncIterator[None]:
    """Abandon the generation if the client closes its connection, or if this block fails.

    The request's body must have been read: from then on the server has nothing else to deliver.
    """

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        generation.abandon()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except BaseException:
        generation.abandon()
        raise
    finally:
        watcher.cancel()
