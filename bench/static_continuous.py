"""Static against continuous batching on one engine (46 min; 15 min for one --batches value).

All requests arrive at t = 0 and the batch size is the same; static batching admits only into an
empty batch. Two throughputs are shown: of the whole run, in which the batch empties at the end, and
saturated, up to the last admission. The ideal ratio counts steps only, as if a step with free
running slots cost as much as a full one. Latencies start at t = 0 and so include queueing.
"""

import argparse
import heapq
from collections.abc import Sequence
from typing import Any

from bench.engines import Engine, EngineReply, ask_all, request, warm_up
from bench.exhibit import Options, present
from bench.exhibit_result import ExhibitResult, Plot
from bench.timing import percentile
from bench.workloads import Workload, load

LISTS = ("sharegpt", "exponential", "uniform")
# Ratios of an idealised simulation with batches of 8 and 32, where a step costs a + b x batch.
PREDICTED = {"sharegpt": "3.3 - 5.0", "exponential": "2.7 - 3.9", "uniform": "1.8 - 1.9"}
COLUMNS = (
    "list, batch", "static tok/s", "continuous tok/s", "ratio", "saturated ratio", "ideal",
    "predicted", "occupancy s / c", "TTFT p50 s / c", "TTFT p99 s / c", "E2E p50 s / c",
    "E2E p99 s / c",
)  # fmt: skip


async def body(options: Options) -> ExhibitResult:
    """Measure static and continuous batching on each list, with each batch size."""
    batches = [4] if options.quick else options.batches
    lists = [load(name) for name in (options.lists or LISTS)]
    if options.quick:
        lists = [workload.first(12, shrink=16) for workload in lists]
    result = ExhibitResult(
        "Static against continuous batching", [w.lengths for w in lists], COLUMNS
    )
    bars: dict[str, list[tuple[float | str, float]]] = {"static": [], "continuous": []}
    for batch in batches:
        flags = ("--max-num-seqs", str(batch), "--no-enable-prefix-caching")
        async with (
            Engine(options.model, "--scheduling", "static", *flags) as static,
            Engine(options.model, "--scheduling", "continuous", *flags) as continuous,
        ):
            engines = {"static": static, "continuous": continuous}
            for workload in lists:
                runs = {name: await measure(engines[name], workload, batch) for name in engines}
                for name, run in runs.items():
                    bars[name].append((f"{workload.name} {batch}", run["tok_s"]))
                result.rows.append(row(workload, batch, runs))
                result.figures[f"{workload.name}-{batch}"] = runs
    result.plot = Plot("bars", "list and batch size", "output tokens/s", bars)
    return result


async def measure(engine: Engine, workload: Workload, batch: int) -> dict[str, Any]:
    """Measure one run; the other engine is idle."""
    await warm_up(engine)
    before = await engine.client.stats()
    jobs = enumerate(workload.jobs)
    replies = await ask_all(
        engine, (request(workload.prompt(i), job.output_tokens) for i, job in jobs)
    )
    after = await engine.client.stats()
    rows, steps = (after[k] - before[k] for k in ("step_rows_total", "steps_total"))
    return {**throughput(replies), "occupancy": rows / steps / batch, **latencies(replies)}


def throughput(replies: Sequence[EngineReply]) -> dict[str, float]:
    """Return output tokens a second of the whole run, and up to the last admission."""
    start_s = min(r.timing.sent_s for r in replies)
    end_s = max(r.timing.arrivals_s[-1] for r in replies)
    last_s = max(r.admitted_s or 0.0 for r in replies)
    early = sum(arrival <= last_s for r in replies for arrival in r.timing.arrivals_s)
    total = sum(r.served_record.output_tokens for r in replies)
    saturated = early / max(1e-9, last_s - start_s)
    return {"tok_s": total / (end_s - start_s), "saturated_tok_s": saturated}


def latencies(replies: Sequence[EngineReply]) -> dict[str, float]:
    """Return TTFT and end-to-end latency from t = 0."""
    ttfts = [r.timing.ttft_ms for r in replies]
    ends = [r.timing.e2el_ms for r in replies]
    return {
        f"{name}_p{percent}_ms": percentile(values, percent)
        for name, values in (("ttft", ttfts), ("e2e", ends))
        for percent in (50, 99)
    }


def row(workload: Workload, batch: int, runs: dict[str, dict[str, Any]]) -> list[str | float]:
    """Return one row of the table."""
    s, c = runs["static"], runs["continuous"]
    seconds = [
        f"{s[name] / 1000:.1f} / {c[name] / 1000:.1f} s"
        for name in ("ttft_p50_ms", "ttft_p99_ms", "e2e_p50_ms", "e2e_p99_ms")
    ]
    saturated = c["saturated_tok_s"] / max(1e-9, s["saturated_tok_s"])
    return [
        f"{workload.name}, {batch}", s["tok_s"], c["tok_s"], c["tok_s"] / s["tok_s"], saturated,
        ideal_ratio([job.output_tokens for job in workload.jobs], batch),
        PREDICTED[workload.name], f"{s['occupancy']:.0%} / {c['occupancy']:.0%}", *seconds,
    ]  # fmt: skip


def ideal_ratio(outputs: Sequence[int], batch: int) -> float:
    """Return the steps of static batching over the steps of continuous batching."""
    static = sum(max(outputs[i : i + batch]) for i in range(0, len(outputs), batch))
    running_slots = [0] * batch
    for output in outputs:
        heapq.heapreplace(running_slots, running_slots[0] + output)
    return static / max(running_slots)


def extend(parser: argparse.ArgumentParser) -> None:
    """Add the exhibit's own flags."""
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 16, 32], metavar="N")
    parser.add_argument("--lists", nargs="+", choices=LISTS, metavar="LIST", help=", ".join(LISTS))


if __name__ == "__main__":
    present(__doc__, body, extend=extend)
