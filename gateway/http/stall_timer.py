"""A time limit for each of many sends, with one timer: a client that reads nothing is stalled."""

import asyncio
from types import TracebackType
from typing import Self

from starlette.requests import ClientDisconnect


class StallTimer:
    """`with timer: await send(...)` raises ClientDisconnect after `seconds` in one send.

    One timer serves all sends of a task: to set and cancel a timeout for each token costs as much
    as the rest of its way through the gateway.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._since: float | None = None  # when the send in progress began
        self._is_stalled = False
        self._timer = self._loop.call_later(seconds, self._look)

    def close(self) -> None:
        """Stop the timer."""
        self._timer.cancel()

    def __enter__(self) -> Self:
        self._since = self._loop.time()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._since = None
        if self._is_stalled and kind is asyncio.CancelledError:
            assert self._task is not None, "a send runs in a task"
            self._task.uncancel()
            raise ClientDisconnect from None

    def _look(self) -> None:
        now = self._loop.time()
        if self._since is not None and now - self._since >= self._seconds:
            self._is_stalled = True
            assert self._task is not None, "a send runs in a task"
            self._task.cancel()
            return
        wait = self._seconds if self._since is None else self._since + self._seconds - now
        self._timer = self._loop.call_later(max(wait, 0.001), self._look)
