"""What prefix caching costs where nothing is ever reused (full: about 2 min).

Two engines, one with caching and one without, alternate on the same prompts, all of them new. Wall
time is what a client sees; processor time is steadier on a busy machine. One reused token makes the
figure void.

The figure is of the steady state. Both pools are small, and the one with caching is filled before
the measurement, so that it evicts. While a pool fills, an engine with caching takes fresh memory
from the system for every block and one without reuses a few blocks: once in the life of a pool,
28 ms a prompt of 512 tokens on a virtual machine whose host commits memory lazily.
"""

import random
from statistics import median
from time import perf_counter
from typing import Any

from bench.engines import Engine, ask_all, request, warm_up
from bench.errors import BenchError
from bench.exhibit import Options, present
from bench.exhibit_result import ExhibitResult, Plot
from bench.machine import process_cpu_seconds
from bench.timing import percentile
from bench.workloads import token_ids

PROMPT_TOKENS, OUTPUT_TOKENS = 512, 16
MOST_PERCENT = 2.0
POOL = ("--kv-cache-memory", str(512 * 2**20))
MOST_BURSTS = 100  # enough to fill a pool


async def body(options: Options) -> ExhibitResult:
    """Run both engines each round; the order within a round alternates."""
    rounds, num_requests = (2, 4) if options.quick else (16, 16)
    times: dict[str, list[dict[str, float]]] = {"on": [], "off": []}
    async with (
        Engine(options.model, "--enable-prefix-caching", *POOL) as on,
        Engine(options.model, "--no-enable-prefix-caching", *POOL) as off,
    ):
        engines = {"on": on, "off": off}
        for engine in engines.values():
            await warm_up(engine)
            await measure(engine, num_requests, "uncounted")
        await fill_pool(on)
        for number in range(rounds):
            for name in sorted(engines, reverse=number % 2 == 0):
                times[name].append(await measure(engines[name], num_requests, str(number)))
    result = ExhibitResult(
        "Prefix caching at 0 % hits",
        [f"fixed: {num_requests} x {PROMPT_TOKENS} in, {OUTPUT_TOKENS} out, all different"],
        ("measure", "caching on, s", "caching off, s", "overhead", "quartiles", "at most"),
    )
    for measure_name in ("wall", "processor"):
        result.rows.append(row(measure_name, times))
    result.figures = {"rounds": times}
    points: dict[str, list[tuple[float | str, float]]] = {
        name: list(enumerate(run["processor"] for run in runs)) for name, runs in times.items()
    }
    result.plot = Plot("lines", "round", "processor seconds a round", points)
    return result


def row(name: str, times: dict[str, list[dict[str, float]]]) -> tuple[str | float, ...]:
    """Return the medians, and the median overhead of neighbouring pairs."""
    on, off = ([run[name] for run in times[arm]] for arm in ("on", "off"))
    overheads = [100 * (a / b - 1) for a, b in zip(on, off, strict=True)]
    low, high = percentile(overheads, 25), percentile(overheads, 75)
    return (
        name, median(on), median(off), f"{median(overheads):+.2f} %", f"{low:+.2f} {high:+.2f}",
        f"{MOST_PERCENT} %",
    )  # fmt: skip


async def fill_pool(engine: Engine) -> None:
    """Fill the pool with prompts of no output, until each new prompt evicts an old one."""
    for burst in range(MOST_BURSTS):
        stats = await engine.client.stats()
        if stats["kv_blocks_free"] == 0:
            return
        chance = random.Random(f"overhead:fill {burst}")
        prompts = [token_ids(chance, PROMPT_TOKENS) for _ in range(4)]
        await ask_all(engine, (request(prompt, 0) for prompt in prompts))
    raise BenchError("the pool did not fill")


async def measure(engine: Engine, num_requests: int, salt: str) -> dict[str, Any]:
    """Run one burst of requests; return its wall and processor seconds."""
    chance = random.Random(f"overhead:{salt}")
    prompts = [token_ids(chance, PROMPT_TOKENS) for _ in range(num_requests)]
    start_s, start_cpu = perf_counter(), process_cpu_seconds(engine.pid)
    replies = await ask_all(engine, (request(prompt, OUTPUT_TOKENS) for prompt in prompts))
    if any(r.served_record.tokens_computed != PROMPT_TOKENS for r in replies):
        raise BenchError("a prompt that was never sent before was reused")
    return {
        "wall": perf_counter() - start_s,
        "processor": process_cpu_seconds(engine.pid) - start_cpu,
    }


if __name__ == "__main__":
    present(__doc__, body)
