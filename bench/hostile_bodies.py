"""What one hostile body costs the gateway: loop stalls, memory, other clients (full: about 1 min).

A gateway without an engine serves `count_tokens` in a process of its own; a task on its event loop
measures how late it is called. Each body is sent three times over a fresh gateway's socket. Then
eight clients ask short questions, alone and beside two that send hostile bodies without a pause.
"""

import asyncio
import multiprocessing
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Any

import httpx
import uvloop

from bench.errors import BenchError
from bench.exhibit import Options, present
from bench.exhibit_result import ExhibitResult, Plot
from bench.machine import resident_bytes
from billing.customers import create_key, create_organization
from billing.database import Database, migrate
from engine.client import EngineInfo, Sampling, connect_engine
from gateway.app import create_app
from gateway.background.ownership import register_gateway
from gateway.clock import now_ms
from gateway.dependencies import Dependencies
from gateway.http.http_server import listening, serve
from gateway.http.json_shape import MAX_TEXT_BYTES
from gateway.ids import id_maker
from gateway.prompts.model_catalog import Catalog, read_model
from gateway.settings import Settings

KEY = "kv-bench"
HEADERS = {"x-api-key": KEY, "anthropic-version": "2023-06-01"}
SIZE = 31_000_000  # just below the largest body
MOST_STALL_MS = 50.0
MOST_TIMES_ITS_SIZE = 10
ALLOWANCE_BYTES = 32_000_000  # a small body's parsed form, whatever its size
TICK_SECONDS = 0.001
WINDOW_TOKENS = 8_192
OTHERS, HOSTILE = 8, 2

Sizes = dict[str, bytes]


def hostile_bodies(size: int) -> Sizes:
    """The bodies that once stopped the gateway for seconds; each is refused by its counts."""
    return {
        "nested tools": _filled(b'{"tools":[%b]}', b"[[[[]]]]", size),
        "lists in system": _filled(b'{"system":[%b]}', b"[]", size),
        "text blocks": _filled(
            b'{"messages":[{"role":"user","content":[%b]}]}', b'{"type":"text","text":"a"}', size
        ),
        "keys": b"{" + b",".join(b'"%x":1' % i for i in range(size // 12)) + b"}",
        "100,000 messages": _filled(
            b'{"messages":[%b]}', b'{"role":"user","content":"a"}', min(size, 3_000_000)
        ),
    }


def accepted_bodies(size: int) -> Sizes:
    """Bodies at the limits, which are parsed: the most blocks, the longest texts."""
    whole = b'{"model":"m","messages":[%b]}'
    text = b'{"model":"m","messages":[{"role":"user","content":"%b"}]}'
    size = min(size, MAX_TEXT_BYTES - 1_000)
    return {
        "10,000 messages": whole % b",".join([b'{"role":"user","content":"a"}'] * 10_000),
        "one text of digits": text % (b"7" * min(size, 600_000)),
        "one text": text % (b"word " * (size // 5)),
        "one text of escapes": text % (b"\\n" * (size // 2)),
        "one text of emoji": text % ("\U0001f600".encode() * (size // 4)),
    }


def _filled(body: bytes, item: bytes, size: int) -> bytes:
    return body % b",".join([item] * (size // (len(item) + 1)))


async def body(options: Options) -> ExhibitResult:
    """Send each body, then load the gateway with ordinary and hostile clients."""
    size = SIZE // 10 if options.quick else SIZE
    result = ExhibitResult(
        "One body's cost: the longest pause of the event loop, and memory",
        [f"fixed: bodies of {size / 1e6:.0f} MB, where not named otherwise"],
        ("body", "MB", "status", "response ms", "longest stall ms", "memory MB"),
    )
    hostile = hostile_bodies(size)
    for name, content in (hostile | accepted_bodies(size)).items():
        with _gateway(options.model) as (url, probe):
            cost = await _cost(url, probe, content)
        result.rows.append((name, len(content) / 1e6, *cost.values()))
        result.figures[name] = cost | {"bytes": len(content)}
        if name in hostile:
            result.fault = result.fault or _excess(name, cost, len(content))
    result.figures["others"] = others = await _beside(options, hostile["nested tools"])
    result.notes.append(
        f"{OTHERS} clients: {others['alone']:.0f} responses a second alone, "
        f"{others['beside']:.0f} beside {HOSTILE} that send nested tools without a pause"
    )
    stalls: list[tuple[float | str, float]] = [
        (name, cost["longest stall ms"])
        for name, cost in result.figures.items()
        if name != "others"
    ]
    result.plot = Plot("bars", "body", "longest stall, ms", {"stall": stalls})
    return result


def _excess(name: str, cost: dict[str, Any], num_bytes: int) -> str | None:
    if cost["longest stall ms"] > MOST_STALL_MS:
        return f"{name} stopped the loop for {cost['longest stall ms']:.0f} ms"
    if cost["memory MB"] * 1e6 > MOST_TIMES_ITS_SIZE * num_bytes + ALLOWANCE_BYTES:
        return f"{name} took {cost['memory MB']:.0f} MB"
    return None


async def _cost(url: str, probe: Connection, content: bytes) -> dict[str, Any]:
    """Send a body three times; return the last status and the worst figures."""
    status, slowest_s = 0, 0.0
    async with httpx.AsyncClient(headers=HEADERS, timeout=60) as client:
        await client.post(url, content=b"{}")  # what the first request alone costs
        _ask(probe)
        for _ in range(3):
            start_s = perf_counter()
            status = (await client.post(url, content=content)).status_code
            slowest_s = max(slowest_s, perf_counter() - start_s)
    stall_ms, memory_mb = _ask(probe)
    return {
        "status": status,
        "response ms": round(slowest_s * 1e3, 1),
        "longest stall ms": round(stall_ms, 1),
        "memory MB": round(memory_mb, 1),
    }


async def _beside(options: Options, content: bytes) -> dict[str, float]:
    """The responses a second that ordinary clients get, alone and beside hostile ones."""
    seconds = 2 if options.quick else 10
    with _gateway(options.model) as (url, _):
        alone = await _ordinary_rate(url, seconds)
        hostile = [asyncio.create_task(_post_for_ever(url, content)) for _ in range(HOSTILE)]
        beside = await _ordinary_rate(url, seconds)
        for task in hostile:
            task.cancel()
        await asyncio.gather(*hostile, return_exceptions=True)
    return {"alone": alone, "beside": beside}


async def _ordinary_rate(url: str, seconds: float) -> float:
    num_responses = 0
    question = {"model": "m", "messages": [{"role": "user", "content": "What is gravity?"}]}

    async def ask() -> None:
        nonlocal num_responses
        async with httpx.AsyncClient(headers=HEADERS, timeout=60) as client:
            while perf_counter() < end_s:
                response = await client.post(url, json=question)
                if response.status_code != httpx.codes.OK:
                    raise BenchError(f"a question got {response.status_code}: {response.text}")
                num_responses += 1

    end_s = perf_counter() + seconds
    async with asyncio.TaskGroup() as clients:
        for _ in range(OTHERS):
            clients.create_task(ask())
    return num_responses / seconds


async def _post_for_ever(url: str, content: bytes) -> None:
    async with httpx.AsyncClient(headers=HEADERS, timeout=60) as client:
        while True:
            await client.post(url, content=content)


@contextmanager
def _gateway(model: Path) -> Iterator[tuple[str, Connection]]:
    """A gateway process: the URL of `count_tokens`, and the pipe that asks for its figures."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        process = context.Process(target=_serve, args=(theirs, model, Path(folder)), daemon=True)
        process.start()
        try:
            if not ours.poll(60):
                raise BenchError("the gateway did not start")
            yield f"http://127.0.0.1:{ours.recv()}/v1/messages/count_tokens", ours
        finally:
            process.kill()
            process.join()


def _ask(probe: Connection) -> tuple[float, float]:
    """The longest stall in ms and the memory in MB since the last question."""
    probe.send("?")
    if not probe.poll(60):
        raise BenchError("the gateway does not answer its probe")
    stall_ms, memory_mb = probe.recv()
    return stall_ms, memory_mb


def _serve(probe: Connection, model: Path, folder: Path) -> None:
    with listening("127.0.0.1", 0) as listener:
        uvloop.run(_serve_on(listener, probe, model, folder))


async def _serve_on(listener: socket.socket, probe: Connection, model: Path, folder: Path) -> None:
    deps = _dependencies(model, folder)
    await register_gateway(deps, instance_id="bench", engine_id="bench")
    _Watch(probe)
    probe.send(listener.getsockname()[1])
    await serve(
        create_app(deps),
        listener,
        stop=asyncio.Event(),
        drain=lambda: asyncio.sleep(0),
    )


def _dependencies(model: Path, folder: Path) -> Dependencies:
    settings = Settings(data_dir=folder)
    migrate(settings.ledger_url)
    database = Database(settings.ledger_url, now_ms=now_ms)
    new_id = id_maker(now_ms)
    database.write_now(
        lambda conn: create_organization(
            conn, id="org_1", name="bench", mode="postpaid", now_ms=now_ms()
        )
    )
    database.write_now(
        lambda conn: create_key(
            conn, id="key_1", secret=KEY, organization_id="org_1", name="bench",
            kind="customer", now_ms=now_ms(),
        )
    )  # fmt: skip
    served = read_model(model, _info(), min_cache_tokens=512)
    return Dependencies(
        settings=settings,
        engine=connect_engine(settings.link_url),
        database=database,
        catalog=Catalog([served]),
        secret=b"bench",
        boot_id="gw_bench",
        now_ms=now_ms,
        new_id=new_id,
    )


def _info() -> EngineInfo:
    """What an engine would say of the model; its vocabulary is not looked at."""
    return EngineInfo(
        engine_id="bench",
        engine_boot_id="bench",
        model_id="m",
        weights_digest="bench",
        vocab_size=49_152,
        max_model_len=WINDOW_TOKENS,
        max_request_tokens=WINDOW_TOKENS,
        block_size=16,
        num_blocks=1,
        pin_cap_blocks=0,
        dtype="float32",
        device="cpu",
        stop_token_ids=(2,),
        default_sampling=Sampling(),
    )


class _Watch:
    """Measures the event loop that it is made on, and reports over the pipe when asked."""

    def __init__(self, probe: Connection) -> None:
        self._probe = probe
        self._loop = asyncio.get_running_loop()
        self._longest_s = 0.0
        self._resident_bytes = 0
        self._loop.add_reader(probe.fileno(), self._report)
        self._tick(perf_counter())

    def _tick(self, due_s: float) -> None:
        now_s = perf_counter()
        self._longest_s = max(self._longest_s, now_s - due_s)
        self._loop.call_later(TICK_SECONDS, self._tick, now_s + TICK_SECONDS)

    def _report(self) -> None:
        self._probe.recv()
        peak_bytes = resident_bytes_at_peak()
        self._probe.send((self._longest_s * 1e3, (peak_bytes - self._resident_bytes) / 1e6))
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        self._longest_s = 0.0
        self._resident_bytes = resident_bytes(os.getpid(), "VmRSS")


def resident_bytes_at_peak() -> int:
    """Return this process's largest memory since its peak was last reset."""
    return resident_bytes(os.getpid(), "VmHWM")


if __name__ == "__main__":
    present(__doc__, body)
