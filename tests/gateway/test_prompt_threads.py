"""Threads are shared: nobody has all of them, and turns go round."""

import asyncio
import threading

import pytest

from gateway.errors import Overloaded
from gateway.prompts import prompt_threads
from gateway.prompts.prompt_threads import PromptThreads


class Work:
    """Work that runs until it is released, and says in which order it began."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.released = threading.Event()

    def start(self, threads: PromptThreads, customer: str) -> asyncio.Task[None]:
        def run() -> None:
            self.begun.append(customer)
            assert self.released.wait(10)

        return asyncio.create_task(threads.run(customer, run))

    async def has_begun(self, count: int) -> None:
        async with asyncio.timeout(10):
            while len(self.begun) < count:  # noqa: ASYNC110 - other threads' state
                await asyncio.sleep(0.001)


async def test_another_customers_prompt_starts_while_one_has_all_it_may() -> None:
    threads, work = PromptThreads(num_threads=2), Work()

    greedy = [work.start(threads, "greedy") for _ in range(3)]
    await work.has_begun(1)
    other = work.start(threads, "other")
    await work.has_begun(2)

    assert work.begun == ["greedy", "other"]
    work.released.set()
    await asyncio.gather(*greedy, other)


async def test_customers_take_turns() -> None:
    threads, work = PromptThreads(num_threads=2), Work()
    first = [work.start(threads, name) for name in ("a", "b")]
    await work.has_begun(2)

    rest = [work.start(threads, name) for name in ("a", "a", "a", "c")]
    await asyncio.sleep(0)
    work.released.set()
    await asyncio.gather(*first, *rest)

    assert work.begun.index("c") < 4, "behind one of a's, not behind three"


async def test_too_much_waiting_work_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_threads, "MAX_WAITING_OF_ONE", 1)
    threads, work = PromptThreads(num_threads=2), Work()
    running = [work.start(threads, "a") for _ in range(2)]
    await work.has_begun(1)

    with pytest.raises(Overloaded):
        await threads.run("a", lambda: None)

    work.released.set()
    await asyncio.gather(*running)


async def test_a_cancelled_wait_gives_its_turn_away() -> None:
    threads, work = PromptThreads(num_threads=2), Work()
    running = work.start(threads, "a")
    await work.has_begun(1)
    waiting = work.start(threads, "a")
    await asyncio.sleep(0)

    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    work.released.set()
    await running

    assert await threads.run("a", lambda: 5) == 5
    assert work.begun == ["a"]


async def test_an_error_of_the_work_is_its_callers() -> None:
    threads = PromptThreads()

    with pytest.raises(ZeroDivisionError):
        await threads.run("a", lambda: 1 // 0)
