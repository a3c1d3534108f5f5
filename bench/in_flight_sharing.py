"""Sixteen identical cold prefixes at once are computed once and leased once (full: about 1 min).

Each prompt is the same prefix, marked as a cache write, and its own suffix. The leader computes the
prefix; the followers wait for it without holding blocks, then read it. A second arm with prefix
caching off shows the saving. One computed token beyond prefix and suffixes makes the figure void.
"""

import random
from time import perf_counter
from typing import Any

from bench.engines import Engine, EngineReply, ask_all, request, warm_up
from bench.errors import BenchError
from bench.exhibit import Options, present
from bench.exhibit_result import ExhibitResult, Plot
from bench.timing import percentile
from bench.workloads import token_ids
from engine.client import Breakpoint

SUFFIX_TOKENS, OUTPUT_TOKENS, TTL_MS = 16, 8, 300_000


async def body(options: Options) -> ExhibitResult:
    """Measure with sharing and without."""
    num_prompts, prefix_tokens = (6, 512) if options.quick else (16, 2_048)
    result = ExhibitResult(
        f"{num_prompts} identical cold prefixes of {prefix_tokens:,} tokens at once",
        [f"fixed: {num_prompts} x ({prefix_tokens} + {SUFFIX_TOKENS}) in, {OUTPUT_TOKENS} out"],
        ("arm", "prompt tokens computed", "predicted", "leases created", "TTFT p50 ms",
         "TTFT p99 ms", "seconds"),
    )  # fmt: skip
    suffixes = num_prompts * SUFFIX_TOKENS
    arms = (("shared", (), 1), ("caching off", ("--no-enable-prefix-caching",), num_prompts))
    for arm, flags, copies in arms:
        async with Engine(options.model, *flags) as engine:
            await warm_up(engine)
            run = await measure(engine, num_prompts, prefix_tokens)
        predicted = copies * prefix_tokens + suffixes
        created = 0 if flags else 1
        if (run["computed"], run["created"]) != (predicted, created):
            raise BenchError(f"{arm}: {run}, where {predicted} computed, {created} created")
        result.rows.append((
            arm, run["computed"], predicted, run["created"], run["ttft_p50_ms"],
            run["ttft_p99_ms"], run["seconds"],
        ))  # fmt: skip
        result.figures[arm] = run
    points: list[tuple[float | str, float]] = [
        (arm, run["computed"]) for arm, run in result.figures.items()
    ]
    result.plot = Plot("bars", "", "prompt tokens computed", {"computed": points})
    return result


async def measure(engine: Engine, num_prompts: int, prefix_tokens: int) -> dict[str, Any]:
    """Send all prompts in one burst."""
    chance = random.Random("in flight")
    prefix = token_ids(chance, prefix_tokens)
    mark = Breakpoint(prefix_tokens, TTL_MS, write=True)
    start_s = perf_counter()
    replies: list[EngineReply] = await ask_all(
        engine,
        (
            request(prefix + token_ids(chance, SUFFIX_TOKENS), OUTPUT_TOKENS, breakpoints=(mark,))
            for _ in range(num_prompts)
        ),
    )
    ttfts = [r.timing.ttft_ms for r in replies]
    return {
        "computed": sum(r.served_record.tokens_computed for r in replies),
        "created": sum(g.outcome == "granted" for r in replies for g in r.served_record.grants),
        "ttft_p50_ms": percentile(ttfts, 50),
        "ttft_p99_ms": percentile(ttfts, 99),
        "seconds": perf_counter() - start_s,
    }


if __name__ == "__main__":
    present(__doc__, body)
