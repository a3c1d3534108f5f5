"""Open-loop load while leases fill the pin cap (full: about 5 min).

Two arms with the same Poisson arrivals: one without leases, one with the cap filled until leases
are refused. Half of the requests ask for a new lease, which the full arm must refuse; the other
half read a pinned prefix, or compute it in the arm without leases. Every request must end, the cap
must never be exceeded, and refusals are counted.
"""

import argparse
import asyncio
import random
from collections import Counter
from time import perf_counter
from typing import Any

from bench.engines import Engine, EngineReply, ask_at_rate, request, warm_up
from bench.errors import BenchError
from bench.exhibit import Options, present
from bench.exhibit_result import ExhibitResult, Plot
from bench.timing import goodput, percentile
from bench.workloads import token_ids
from engine.client import Breakpoint, GenerateRequest

PROMPT_TOKENS, MARKED_TOKENS, OUTPUT_TOKENS = 256, 192, 32
TTL_MS = 3_600_000
TTFT_MS, TPOT_MS = 2_000, 200  # the objectives that goodput counts
NUM_LEASES = 12


async def body(options: Options) -> ExhibitResult:
    """Run the arm without leases, then the full one."""
    num_requests = 12 if options.quick else 120
    result = ExhibitResult(
        f"Pin pressure, {options.rate} requests/s",
        [f"fixed: {num_requests} x {PROMPT_TOKENS} in, {OUTPUT_TOKENS} out, Poisson arrivals"],
        ("leases", "pinned / cap", "granted", "refused", "overloaded", "TTFT p50 ms", "TTFT p99 ms",
         f"goodput/s (TTFT {TTFT_MS}, TPOT {TPOT_MS} ms)", "preemptions"),
    )  # fmt: skip
    bars: list[tuple[float | str, float]] = []
    for arm in ("none", "cap full"):
        async with Engine(options.model, "--kv-cache-memory", str(options.pool_bytes)) as engine:
            await warm_up(engine)
            run = await measure(engine, num_requests, options.rate, full=arm == "cap full")
        bars.append((arm, run["ttft_p99_ms"]))
        result.rows.append((
            arm, f"{run['pinned']} / {run['cap']}", run["granted"], run["refused"],
            run["overloaded"], run["ttft_p50_ms"], run["ttft_p99_ms"], run["goodput"],
            run["preemptions"],
        ))  # fmt: skip
        result.figures[arm] = run
    result.plot = Plot("bars", "leases", "TTFT p99, ms", {"TTFT p99": bars})
    return result


async def measure(engine: Engine, num_requests: int, rate: float, *, full: bool) -> dict[str, Any]:
    """Run one arm."""
    chance = random.Random("pin pressure")
    info = engine.info
    most_tokens = info.pin_cap_blocks * info.block_size // NUM_LEASES
    length = min(most_tokens, info.max_request_tokens - PROMPT_TOKENS)
    prefixes = [token_ids(chance, MARKED_TOKENS) for _ in range(NUM_LEASES)]
    if full:
        await fill(engine, prefixes, length, chance)
    start_s = perf_counter()
    watch = asyncio.create_task(watch_cap(engine))
    requests = [make(prefixes, number, chance, full=full) for number in range(num_requests)]
    replies = await ask_at_rate(
        engine, requests.__getitem__, num_requests=num_requests, rate_per_second=rate, chance=chance
    )
    seconds = perf_counter() - start_s
    watch.cancel()
    stats = await engine.client.stats()
    outcomes = Counter(g.outcome for r in replies if r.record for g in r.record.grants if g.write)
    if full and outcomes["granted"]:
        raise BenchError(f"{outcomes['granted']} leases were granted above a full cap")
    return summary(replies, seconds) | {
        "pinned": int(stats["kv_blocks_pinned"]),
        "cap": info.pin_cap_blocks,
        "granted": outcomes["granted"],
        "refused": outcomes["refused"],
        "preemptions": int(stats["preemptions_total"]),
    }


async def fill(engine: Engine, prefixes: list[bytes], length: int, chance: random.Random) -> None:
    """Pin a long lease over each prefix, then smaller ones until the cap is full."""
    block_size = engine.info.block_size
    blocks = max(MARKED_TOKENS, length) // block_size
    heads = list(prefixes)
    while blocks:
        head = heads.pop() if heads else b""
        prompt = head + token_ids(chance, blocks * block_size - len(head) // 4)
        mark = Breakpoint(blocks * block_size, TTL_MS, write=True)
        reply = await engine.ask(request(prompt, 0, breakpoints=(mark,)))
        if reply.served_record.grants[0].outcome == "refused":
            blocks //= 2
    stats = await engine.client.stats()
    if heads or stats["kv_blocks_pinned"] != engine.info.pin_cap_blocks:
        raise BenchError(f"the cap is not full, or too small for {NUM_LEASES} leases: {stats}")


def make(
    prefixes: list[bytes], number: int, chance: random.Random, *, full: bool
) -> GenerateRequest:
    """Return a request: odd numbers read a pinned prefix, even ones ask for a lease."""
    if number % 2:
        prompt = chance.choice(prefixes) + token_ids(chance, PROMPT_TOKENS - MARKED_TOKENS)
        return request(prompt, OUTPUT_TOKENS, read_tokens=MARKED_TOKENS if full else 0)
    mark = Breakpoint(MARKED_TOKENS, TTL_MS, write=True)
    return request(token_ids(chance, PROMPT_TOKENS), OUTPUT_TOKENS, breakpoints=(mark,))


def summary(replies: list[EngineReply], seconds: float) -> dict[str, Any]:
    """Return the latencies of the requests that were served."""
    served = [r.timing for r in replies if r.record]
    ttfts = [timing.ttft_ms for timing in served]
    return {
        "overloaded": len(replies) - len(served),
        "ttft_p50_ms": percentile(ttfts, 50),
        "ttft_p99_ms": percentile(ttfts, 99),
        "goodput": goodput(served, seconds=seconds, ttft_ms=TTFT_MS, tpot_ms=TPOT_MS),
    }


async def watch_cap(engine: Engine) -> None:
    """Read the stats until cancelled. Raises BenchError if the pin cap is exceeded."""
    while True:
        pinned = (await engine.client.stats())["kv_blocks_pinned"]
        if pinned > engine.info.pin_cap_blocks:
            raise BenchError(f"{pinned:.0f} blocks pinned of {engine.info.pin_cap_blocks}")
        await asyncio.sleep(0.5)


def extend(parser: argparse.ArgumentParser) -> None:
    """Add the exhibit's own flags."""
    parser.add_argument("--rate", type=float, default=1.0, metavar="REQUESTS_PER_SECOND")
    parser.add_argument("--pool-bytes", type=int, default=400 << 20, metavar="BYTES")


if __name__ == "__main__":
    present(__doc__, body, extend=extend)
