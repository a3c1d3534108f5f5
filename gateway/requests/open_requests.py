"""The registry of open requests, and their drain when the process stops."""

import asyncio
import logging
from collections.abc import Collection

from gateway.dependencies import Dependencies
from gateway.errors import Overloaded
from gateway.requests.generation import Generation
from gateway.requests.order import Order
from gateway.shutdown import SETTLING_SECONDS

log = logging.getLogger(__name__)


class OpenRequests:
    """Starts generations and keeps them until they have ended.

    hold_left_open  set when recovery has work: a request ended with its hold open, an owner died
    fenced          set when another gateway has taken this one for dead: the process must end
    """

    def __init__(self, deps: Dependencies) -> None:
        self.hold_left_open = asyncio.Event()
        self.fenced = asyncio.Event()
        self._deps = deps
        self._tasks: dict[asyncio.Task[None], Generation] = {}
        self._is_draining = False

    @property
    def request_ids(self) -> Collection[str]:
        """The ids of the requests that are open here now."""
        return {generation.order.request_id for generation in self._tasks.values()}

    def start(self, order: Order) -> Generation:
        """Start a request's life. Raises Overloaded once the process is draining."""
        if self._is_draining:
            raise Overloaded("The server is restarting; try again")
        generation = Generation(order, deps=self._deps)
        task = asyncio.create_task(generation.run(), name=order.request_id)
        self._tasks[task] = generation
        task.add_done_callback(self._forget)
        return generation

    async def drain(self, seconds: float) -> None:
        """Take no new requests, give the running ones `seconds`, then stop and settle them.

        A drain that has begun is not begun again: a second call returns at once.
        """
        if self._is_draining:
            return
        self._is_draining = True
        await self._wait(seconds)
        for generation in self._tasks.values():
            generation.stop(Overloaded("The server is restarting; the answer is cut short"))
        await self._wait(SETTLING_SECONDS)
        if self._tasks:
            log.warning("drain_incomplete", extra={"num_requests": len(self._tasks)})

    def fence(self) -> None:
        """Take no new requests and cut the running ones: their holds are another gateway's now."""
        self._is_draining = True
        for generation in self._tasks.values():
            generation.stop(Overloaded("The server was restarted; try again"))
        self.fenced.set()

    async def _wait(self, seconds: float) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)

    def _forget(self, task: asyncio.Task[None]) -> None:
        if self._tasks.pop(task).hold_is_open:
            self.hold_left_open.set()
