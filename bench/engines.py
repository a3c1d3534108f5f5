"""Engines to measure: each a `python -m engine` process with its own folder, used over its link."""

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

from bench.counts import check_counts
from bench.errors import BenchError
from bench.timing import Timing
from bench.workloads import token_ids
from engine.client import (
    Admitted,
    Breakpoint,
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
# Exhibits queue whole workloads at once; the default rejects as overloaded after a minute.
PATIENCE = ("--max-queue-wait-seconds", str(HANG_SECONDS))

_numbers = count()


@dataclass(slots=True)
class EngineReply:
    """An engine's response; if the request was rejected, `record` is None and `refusal` is why."""

    timing: Timing
    admitted_s: float | None = None
    record: EngineRecord | None = None
    refusal: str | None = None

    @property
    def served_record(self) -> EngineRecord:
        """The record. Raises BenchError if the request was rejected."""
        if self.record is None:
            raise BenchError(f"a request was not served: {self.refusal}")
        return self.record


class Engine:
    """An engine process and a client of it, running inside `async with Engine(model, ...)`."""

    def __init__(self, model: Path, *flags: str) -> None:
        self._model, self._flags = model, (*PATIENCE, *flags)
        self._folder: tempfile.TemporaryDirectory[str] | None = None  # from its first start on
        self._process: subprocess.Popen[bytes] | None = None
        self.client: EngineClient

    @property
    def info(self) -> EngineInfo:
        """What the engine reported about itself when the link opened."""
        info = self.client.info
        assert info is not None, "the engine is not connected"
        return info

    @property
    def pid(self) -> int:
        """The process id of the engine."""
        assert self._process is not None, "the engine is not running"
        return self._process.pid

    @property
    def folder(self) -> Path:
        """Its data folder."""
        assert self._folder is not None, "the engine was never started"
        return Path(self._folder.name)

    @property
    def url(self) -> str:
        """The address on which it listens."""
        return f"unix:{self.folder / 'engine.sock'}"

    async def start(self) -> None:
        """Start the process and wait until it serves."""
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
        """Start another process on the same folder, so that what is on disk remains."""
        await self.stop()
        await self.start()

    async def stop(self) -> None:
        """Close the link and shut the process down cleanly."""
        await self.client.close()
        if self._process is not None:
            await asyncio.to_thread(self._process.communicate)  # closes its stdin
            self._process = None

    async def close(self) -> None:
        """Stop, and remove the folder."""
        await self.stop()
        if self._folder is not None:
            self._folder.cleanup()

    async def ask(self, request: GenerateRequest, *, stop_at: int | None = None) -> EngineReply:
        """Send one request, time it and check it; the client ends it after `stop_at` tokens."""
        reply = EngineReply(Timing(perf_counter()))
        try:
            async with asyncio.timeout(HANG_SECONDS):
                await self._follow(request, reply, stop_at)
        except TimeoutError:
            raise BenchError(f"{request.request_id} hangs") from None
        except EngineLost as error:
            code = self._process.poll() if self._process else None
            raise BenchError(f"{error} (exit code {code}): {self.log()}") from error
        timing = reply.timing
        if reply.record is not None:
            check_counts(
                reply.record,
                prompt_tokens=request.num_prompt_tokens,
                seen_tokens=len(timing.arrivals_s),
            )
            timing.output_tokens = reply.record.output_tokens
            del timing.arrivals_s[timing.output_tokens :]
        return reply

    def log(self) -> str:
        """Return the last 1,000 characters of its log."""
        log = (self.folder / "log").read_text(encoding="utf-8", errors="replace")
        return log[-1_000:]

    async def _follow(
        self, request: GenerateRequest, reply: EngineReply, stop_at: int | None
    ) -> None:
        arrivals = reply.timing.arrivals_s
        stream = self.client.generate(request)
        async for event in stream:
            match event:
                case Admitted():
                    reply.admitted_s = perf_counter()
                case Tokens(_, token_ids):
                    arrivals += [perf_counter()] * len(token_ids)
                    if stop_at is not None and len(arrivals) == stop_at:
                        stream.finish(stop_at)
                case Finished(record=record, message=message):
                    reply.record, reply.refusal = record, message
                case Rejected(message=message):
                    reply.refusal = message

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
    """Return a greedy request of fixed output length in the benchmarks' one namespace."""
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
) -> list[EngineReply]:
    """Send all requests at once; return the replies in order."""
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
) -> list[EngineReply]:
    """Open loop: send requests with Poisson arrivals, however many are still running."""
    async with asyncio.TaskGroup() as group:
        tasks = []
        due_s = perf_counter()
        for number in range(num_requests):
            due_s += chance.expovariate(rate_per_second)
            await asyncio.sleep(max(0.0, due_s - perf_counter()))
            tasks.append(group.create_task(engine.ask(make(number))))
    return [task.result() for task in tasks]


async def warm_up(engine: Engine) -> None:
    """Run two uncounted requests, since the first steps of a process are slow."""
    for number in range(2):
        prompt = b"".join((1_000 + number + i).to_bytes(4, "little") for i in range(64))
        await engine.ask(request(prompt, 4, namespace=b"warm-up"))


async def measure_block_bytes(model: Path, *flags: str) -> int:
    """Return the bytes of one KV block, read from the stats of an engine of its own."""
    async with Engine(model, *flags) as engine:
        block = token_ids(random.Random(0), engine.info.block_size)
        lease = Breakpoint(engine.info.block_size, 3_600_000, write=True)
        await engine.ask(request(block, 0, breakpoints=(lease,)))
        stats = await engine.client.stats()
        return int(stats["kv_bytes_pinned"] // stats["kv_blocks_pinned"])
