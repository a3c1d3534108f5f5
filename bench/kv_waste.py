"""KV memory reserved but unused, contiguous against paged layout (full: about 15 min).

Clients do not know their output length and send the largest `max_tokens`; the contiguous layout
reserves that at admission. Each request ends at its drawn length. Both layouts have a pool of the
same size, without prefix caching, so that each slot is counted once. Waste is 1 - live tokens /
reserved slots, averaged over steps.
"""

import asyncio
from time import perf_counter
from typing import Any

from bench.engines import Engine, EngineReply, ask_all, request, warm_up
from bench.exhibit import Options, present
from bench.exhibit_result import ExhibitResult, Plot
from bench.workloads import Workload, load

LISTS = ("exponential", "sharegpt", "uniform")
PREDICTED = {  # contiguous and paged with blocks of 16, by an idealised simulation
    "exponential": "72 % / 1.2 %",
    "sharegpt": "93 % / 2.5 %",
    "uniform": "38 % / 1.0 %",
}
POOL_BYTES = 1 << 30  # room for about 22 reservations of 2,048 tokens of SmolLM2 in bfloat16
SAMPLE_SECONDS = 0.25


async def body(options: Options) -> ExhibitResult:
    """Measure both layouts on every list of lengths."""
    names = LISTS[:1] if options.quick else LISTS
    lists = [load(name) for name in names]
    if options.quick:
        lists = [workload.first(16, shrink=8) for workload in lists]
    result = ExhibitResult(
        "KV waste, contiguous against paged",
        [f"{w.lengths}; max_tokens {w.max_tokens:,}" for w in lists],
        ("list, layout", "waste", "predicted c / p", "most running", "tok/s", "seconds"),
    )
    lines: dict[str, list[tuple[float | str, float]]] = {}
    async with (
        Engine(options.model, *flags("contiguous")) as contiguous,
        Engine(options.model, *flags("paged")) as paged,
    ):
        for workload in lists:
            for layout, engine in (("contiguous", contiguous), ("paged", paged)):
                run = await measure(engine, workload)
                name = f"{workload.name}, {layout}"
                lines[name] = run["over_time"]
                result.rows.append((
                    name, f"{run['waste']:.1%}", PREDICTED[workload.name], run["most_running"],
                    run["tok_s"], run["seconds"],
                ))  # fmt: skip
                result.figures[name] = run
    result.plot = Plot("lines", "seconds", "share of reserved slots without a token", lines)
    return result


def flags(layout: str) -> tuple[str, ...]:
    """Return the flags of a layout; the pool is the same for both."""
    pool = ("--kv-cache-memory", str(POOL_BYTES))
    return ("--kv-layout", layout, "--no-enable-prefix-caching", *pool)


async def measure(engine: Engine, workload: Workload) -> dict[str, Any]:
    """Send everything at t = 0 and sample the slots until all requests end."""
    await warm_up(engine)
    before, start_s = await engine.client.stats(), perf_counter()
    watch = asyncio.create_task(sample(engine, start_s))
    replies = await serve(engine, workload)
    seconds = perf_counter() - start_s
    watch.cancel()
    samples = (await asyncio.gather(watch, return_exceptions=True))[0]
    assert isinstance(samples, list), samples
    after = await engine.client.stats()
    reserved, live = (
        after[f"step_kv_slots_{kind}_total"] - before[f"step_kv_slots_{kind}_total"]
        for kind in ("reserved", "live")
    )
    return {
        "waste": 1 - live / reserved,
        "most_running": int(max((running for _, _, running in samples), default=0)),
        "tok_s": sum(r.served_record.output_tokens for r in replies) / seconds,
        "seconds": seconds,
        "over_time": [(second, waste) for second, waste, _ in samples],
    }


async def serve(engine: Engine, workload: Workload) -> list[EngineReply]:
    """Send requests with the largest `max_tokens`; the client ends each at its drawn length."""
    numbers = range(len(workload.jobs))
    requests = [request(workload.prompt(i), workload.max_tokens) for i in numbers]
    return await ask_all(engine, requests, [job.output_tokens for job in workload.jobs])


async def sample(engine: Engine, start_s: float) -> list[tuple[float, float, float]]:
    """Collect (seconds, waste, running requests) until cancelled."""
    samples: list[tuple[float, float, float]] = []
    try:
        while True:
            stats = await engine.client.stats()
            if reserved := stats["kv_slots_reserved"]:
                waste = 1 - stats["kv_slots_live"] / reserved
                running = stats["num_requests_running"]
                samples.append((round(perf_counter() - start_s, 2), waste, running))
            await asyncio.sleep(SAMPLE_SECONDS)
    except asyncio.CancelledError:
        return samples


if __name__ == "__main__":
    present(__doc__, body)
