"""The requests alive in this process, and how they end when the process does."""

import asyncio
import logging
from collections.abc import Collection

from gateway.admission import Order
from gateway.errors import Overloaded
from gateway.generation import Generation
from gateway.parts import Parts

log = logging.getLogger(__name__)

# After its abort a generation needs one engine step and one commit, with retries.
SETTLING_SECONDS = 4.0


class InFlight:
    """Starts generations and keeps them until they have ended.

    hold_left_open   set when one ended without closing its hold: recovery has work
    stopped_at       of those, the output tokens up to their stop string, which no journal knows
    """

    def __init__(self, parts: Parts) -> None:
        self.hold_left_open = asyncio.Event()
        self.stopped_at: dict[str, int] = {}
        self._parts = parts
        self._tasks: dict[asyncio.Task[None], Generation] = {}
        self._is_draining = False

    @property
    def request_ids(self) -> Collection[str]:
        """The requests that are alive here now."""
        return {generation.order.request_id for generation in self._tasks.values()}

    def start(self, order: Order) -> Generation:
        """Start a request's life. Raises Overloaded once the process is draining."""
        if self._is_draining:
            raise Overloaded("The server is restarting; try again")
        generation = Generation(order, parts=self._parts)
        task = asyncio.create_task(generation.run(), name=order.request_id)
        self._tasks[task] = generation
        task.add_done_callback(self._forget)
        return generation

    async def drain(self, seconds: float) -> None:
        """Take no new requests, give the running ones `seconds`, then stop and settle them."""
        self._is_draining = True
        await self._wait(seconds)
        for generation in self._tasks.values():
            generation.stop(Overloaded("The server is restarting; the answer is cut short"))
        await self._wait(SETTLING_SECONDS)
        if self._tasks:
            log.warning("drain_incomplete", extra={"num_requests": len(self._tasks)})

    async def _wait(self, seconds: float) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)

    def _forget(self, task: asyncio.Task[None]) -> None:
        generation = self._tasks.pop(task)
        if not generation.hold_is_open:
            return
        if generation.stopped_at is not None:
            self.stopped_at[generation.order.request_id] = generation.stopped_at
        self.hold_left_open.set()
