"""The threads that parse and tokenise prompts, shared fairly among customers.

A prompt takes milliseconds, a long one seconds, and free ones (`count_tokens`) can be asked for
without end. One customer never has all threads: the next prompt of another one starts at once.
Beyond that a customer may take whatever no other one waits for.
"""

import asyncio
import os
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from gateway.errors import Overloaded

T = TypeVar("T")

MIN_THREADS = 2  # so that there is one for another customer
# Of one customer; in all. Each holds a body of at most 32 MB, which `http/body_bytes.py` bounds.
MAX_WAITING_OF_ONE = 256
MAX_WAITING = 1_024


class PromptThreads:
    """Runs work in threads: customers take turns, and each has all threads but one at most."""

    def __init__(self, *, num_threads: int | None = None) -> None:
        """Use as many threads as there are processors, if no number is given."""
        self._num_threads = max(MIN_THREADS, num_threads or os.cpu_count() or 1)
        self._executor = ThreadPoolExecutor(self._num_threads, thread_name_prefix="prompts")
        # In the order in which it is their turn; a customer without waiting work is not in it.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._running: Counter[str] = Counter()

    async def run(self, customer: str, work: Callable[[], T]) -> T:
        """Return what `work` returns in a thread, once it is this customer's turn.

        Raises Overloaded if too much work waits, and what `work` raises.
        """
        if not self._may_start(customer) or self._waiting:
            await self._turn(customer)
        else:
            self._running[customer] += 1
        running = asyncio.get_running_loop().run_in_executor(self._executor, work)
        # The thread is taken until the work ends, even if its caller is cancelled before.
        running.add_done_callback(lambda _: self._end(customer))
        return await asyncio.shield(running)

    async def _turn(self, customer: str) -> None:
        """Wait for a thread, and take it."""
        queue = self._waiting.get(customer, ())
        num_waiting = sum(map(len, self._waiting.values()))
        if len(queue) >= MAX_WAITING_OF_ONE or num_waiting >= MAX_WAITING:
            raise Overloaded("Too many prompts wait to be tokenised; try again")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(customer, deque()).append(turn)
        self._start_waiting()
        try:
            await turn
        except asyncio.CancelledError:
            self._withdraw(customer, turn)
            raise

    def _withdraw(self, customer: str, turn: asyncio.Future[Any]) -> None:
        if turn.done() and not turn.cancelled():  # it had its thread already
            self._end(customer)
            return
        queue = self._waiting[customer]
        queue.remove(turn)
        if not queue:
            del self._waiting[customer]

    def _end(self, customer: str) -> None:
        self._running[customer] -= 1
        if self._running[customer] == 0:
            del self._running[customer]
        self._start_waiting()

    def _start_waiting(self) -> None:
        """Give the free threads to the customers whose turn it is."""
        while (customer := next(filter(self._may_start, self._waiting), None)) is not None:
            queue = self._waiting.pop(customer)
            queue.popleft().set_result(None)
            self._running[customer] += 1
            if queue:
                self._waiting[customer] = queue  # behind the others

    def _may_start(self, customer: str) -> bool:
        is_free = self._running.total() < self._num_threads
        return is_free and self._running[customer] < self._num_threads - 1
