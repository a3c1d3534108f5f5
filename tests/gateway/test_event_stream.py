"""A reader that stalls: what only a fake connection can show."""

import asyncio
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from gateway.http.event_stream import EventStream


class EndlessGeneration:
    """An answer that never ends, until it is abandoned."""

    def __init__(self) -> None:
        self.abandoned = asyncio.Event()

    def abandon(self, fault: Exception | None = None) -> None:
        self.abandoned.set()


async def test_a_reader_that_takes_nothing_is_treated_as_gone():
    generation: Any = EndlessGeneration()
    stream = EventStream(generation, ping_seconds=1, headers={}, stalled_seconds=0.05)

    with pytest.raises(ClientDisconnect):
        await stream({"type": "http"}, never, lambda message: never())

    assert generation.abandoned.is_set()


async def test_a_reader_that_leaves_is_noticed_while_nothing_is_sent():
    generation: Any = EndlessGeneration()
    stream = EventStream(generation, ping_seconds=1, headers={}, stalled_seconds=20)

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        await generation.abandoned.wait()
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        await stream({"type": "http"}, receive, send)


async def never() -> Any:
    await asyncio.Event().wait()
