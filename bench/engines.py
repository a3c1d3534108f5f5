"""Engines to measure: `python -m engine` in a folder of its own, asked over its real link."""

import asyncio
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, Self

from bench.counts import BenchError, check_counts
from bench.timing import Timing
from engine.client import (
    Admitted,
    EngineClient,
    EngineInfo,
    EngineLost,
    EngineRecord,
    Finished,
    GenerateRequest,
    Rejected,
    Sampling,
    Tokens,
    connect_engine,
)

START_SECONDS = 180  # the model is read from a cold disk
HANG_SECONDS = 1_800  # no request of any exhibit takes that long
# Exhibits queue whole workloads at once; a server would rather say "overloaded" after a minute.
PATIENCE = ("--max-queue-wait-seconds", str(HANG_SECONDS))

_numbers = count()


@dataclass(slots=True)
class Answer:
    """What came back: `record` is None if the request was rejected, and `refusal` says why."""

    timing: Timing
    admitted_s: float | None = None
    record: EngineRecord | None = None
    refusal: str | None = None

    @property
    def facts(self) -> EngineRecord:
        """The record of a request that must have been admitted."""
        if self.record is None:
            raise BenchError(f"a request was not served: {self.refusal}")
        return self.record


class Engine:
    """`async with Engine(model, ...) as engine:` is a running engine and a client of it."""

    def __init__(self, model: Path, *flags: str) -> None:
        self._model, self._flags = model, (*PATIENCE, *flags)
        self._folder: tempfile.TemporaryDirectory[str] | None = None  # from its first start on
        self._process: subprocess.Popen[bytes] | None = None
        self.client: EngineClient

    @property
    def info(self) -> EngineInfo:
        """What the engine says it is."""
        info = self.client.info
        assert info is not None, "the engine is not connected"
        return info

    @property
    def pid(self) -> int:
        """The engine's process."""
        assert self._process is not None, "the engine is not running"
        return self._process.pid

    @property
    def folder(self) -> Path:
        """Its data folder."""
        assert self._folder is not None, "the engine was never started"
        return Path(self._folder.name)

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"unix:{self.folder / 'engine.sock'}"

    async def start(self) -> None:
        """Start, and wait until it serves."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="kvmeter-bench-")
        process = self._launch()
        self.client = connect_engine(self.url)
        deadline = perf_counter() + START_SECONDS
        while self.client.info is None:
            if process.poll() is not None or perf_counter() > deadline:
                raise BenchError(f"the engine did not start: {self.log()}")
            await asyncio.sleep(0.05)

    async def restart(self) -> None:
        """Another process on the same folder: what is on disk is still there."""
        await self.stop()
        await self.start()

    async def stop(self) -> None:
        """End the process in good order."""
        await self.client.close()
        if self._process is not None:
            await asyncio.to_thread(self._process.communicate)  # closes its stdin
            self._process = None

    async def close(self) -> None:
        """Stop, and remove the folder."""
        await self.stop()
        if self._folder is not None:
            self._folder.cleanup()

    async def ask(self, request: GenerateRequest, *, stop_at: int | None = None) -> Answer:
        """One request, timed and checked against its record; ended by the client at `stop_at`."""
        answer = Answer(Timing(perf_counter()))
        try:
            async with asyncio.timeout(HANG_SECONDS):
                await self._follow(request, answer, stop_at)
        except TimeoutError:
            raise BenchError(f"{request.request_id} hangs") from None
        except EngineLost as error:
            code = self._process.poll() if self._process else None
            raise BenchError(f"{error} (exit code {code}): {self.log()}") from error
        timing = answer.timing
        if answer.record is not None:
            check_counts(
                answer.record,
                prompt_tokens=request.num_prompt_tokens,
                seen_tokens=len(timing.arrivals_s),
            )
            timing.output_tokens = answer.record.output_tokens
            del timing.arrivals_s[timing.output_tokens :]
        return answer

    def log(self) -> str:
        """The end of what it has said."""
        log = (self.folder / "log").read_text(encoding="utf-8", errors="replace")
        return log[-1_000:]

    async def _follow(self, request: GenerateRequest, answer: Answer, stop_at: int | None) -> None:
        arrivals = answer.timing.arrivals_s
        stream = self.client.generate(request)
        async for event in stream:
            match event:
                case Admitted():
                    answer.admitted_s = perf_counter()
                case Tokens(_, token_ids):
                    arrivals += [perf_counter()] * len(token_ids)
                    if stop_at is not None and len(arrivals) == stop_at:
                        stream.finish(stop_at)
                case Finished(record=record, message=message):
                    answer.record, answer.refusal = record, message
                case Rejected(message=message):
                    answer.refusal = message

    def _launch(self) -> subprocess.Popen[bytes]:
        folder = self.folder
        command = [sys.executable, "-m", "engine", "--model", str(self._model)]
        command += ["--data-dir", str(folder), "--listen", self.url, *self._flags]
        command += ["--until-stdin-closes"]  # it ends with this process, however that ends
        with (folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)
        return self._process

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


def request(prompt: bytes, max_tokens: int, **fields: Any) -> GenerateRequest:
    """A greedy request of the one tenant that benches have; its output length is fixed."""
    values: dict[str, Any] = {
        "request_id": f"req_{next(_numbers)}",
        "namespace": b"bench",
        "prompt_token_ids": prompt,
        "max_tokens": max_tokens,
        "sampling": Sampling(temperature=0.0),
        "ignore_eos": True,
    }
    return GenerateRequest(**(values | fields))


async def ask_all(
    engine: Engine, requests: Iterable[GenerateRequest], stops: Iterable[int | None] | None = None
) -> list[Answer]:
    """All at once, as a queue that is never short of work."""
    requests = list(requests)
    stops = [None] * len(requests) if stops is None else list(stops)
    pairs = zip(requests, stops, strict=True)
    return await asyncio.gather(*(engine.ask(r, stop_at=stop) for r, stop in pairs))


async def ask_at_rate(
    engine: Engine,
    make: Callable[[int], GenerateRequest],
    *,
    num_requests: int,
    rate_per_second: float,
    chance: random.Random,
) -> list[Answer]:
    """Open loop: requests leave at Poisson moments, whatever has been answered by then."""
    async with asyncio.TaskGroup() as group:
        tasks = []
        due_s = perf_counter()
        for number in range(num_requests):
            due_s += chance.expovariate(rate_per_second)
            await asyncio.sleep(max(0.0, due_s - perf_counter()))
            tasks.append(group.create_task(engine.ask(make(number))))
    return [task.result() for task in tasks]


async def warm_up(engine: Engine) -> None:
    """Two requests that count for nothing: the first steps of a process are slow."""
    for number in range(2):
        prompt = b"".join((1_000 + number + i).to_bytes(4, "little") for i in range(64))
        await engine.ask(request(prompt, 4, namespace=b"warm-up"))
