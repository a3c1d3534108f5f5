"""Inter-token latency beside a long prefill, with and without chunking (full: 2 min).

While eight requests decode, a long prompt arrives. With chunking, each step computes a part of it
beside the decodes; without, one step computes the whole prompt and every decode waits for it. The
figures are the gaps between tokens of the eight requests while the long prompt is computed.
"""

import asyncio
import random
from typing import Any

from bench.engines import Engine, EngineReply, request, warm_up
from bench.errors import BenchError
from bench.exhibit import Options, present
from bench.exhibit_result import ExhibitResult, Plot
from bench.timing import percentile
from bench.workloads import token_ids

DECODERS, SHORT_TOKENS = 8, 32
STEP_TOKENS = 256  # the budget of a step, shared by decodes and chunk


async def body(options: Options) -> ExhibitResult:
    """Measure one engine with chunked prefill and one without."""
    long_tokens, outputs, rounds = (1_024, 64, 1) if options.quick else (6_000, 400, 5)
    result = ExhibitResult(
        f"Inter-token latency of {DECODERS} decodes beside a prefill of {long_tokens:,} tokens",
        [f"fixed: {DECODERS} x {SHORT_TOKENS} in, {outputs} out; {long_tokens} in, 1 out"],
        ("chunked prefill", "max ITL ms", "p99 ITL ms", "p50 ITL ms", "alone p50 ITL ms",
         "long prompt's TTFT ms"),
    )  # fmt: skip
    bars: dict[str, list[tuple[float | str, float]]] = {"max": [], "p99": [], "p50": []}
    for name, flag in (("on", "--enable-chunked-prefill"), ("off", "--no-enable-chunked-prefill")):
        flags = (flag, "--max-num-batched-tokens", str(STEP_TOKENS), "--no-enable-prefix-caching")
        async with Engine(options.model, *flags) as engine:
            await warm_up(engine)
            runs = [await measure(engine, long_tokens, outputs, n) for n in range(rounds)]
        beside = [gap for run in runs for gap in run["beside"]]
        alone = [gap for run in runs for gap in run["alone"]]
        figures = {"max": max(beside), "p99": percentile(beside, 99), "p50": percentile(beside, 50)}
        ttft = percentile([run["ttft_ms"] for run in runs], 50)
        result.rows.append((name, *figures.values(), percentile(alone, 50), ttft))
        result.figures[name] = figures | {"alone_p50": percentile(alone, 50), "ttft_ms": ttft}
        for key, value in figures.items():
            bars[key].append((name, value))
    result.plot = Plot("bars", "chunked prefill", "inter-token latency, ms", bars)
    return result


async def measure(engine: Engine, long_tokens: int, outputs: int, number: int) -> dict[str, Any]:
    """Return the gaps of the decoding requests before and during one long prefill."""
    chance = random.Random(f"interference:{number}")
    async with asyncio.TaskGroup() as group:
        decoding = [
            group.create_task(engine.ask(request(token_ids(chance, SHORT_TOKENS), outputs)))
            for _ in range(DECODERS)
        ]
        await decoded(engine, DECODERS * 8)
        long = group.create_task(engine.ask(request(token_ids(chance, long_tokens), 1)))
    begin, end = long.result().timing.sent_s, long.result().timing.arrivals_s[0]
    replies = [task.result() for task in decoding]
    if min(r.timing.arrivals_s[-1] for r in replies) < end:
        raise BenchError("the decodes ended before the long prompt was computed")
    return {
        "alone": [gap for r in replies for gap in gaps(r, 0.0, begin)],
        "beside": [gap for r in replies for gap in gaps(r, begin, end)],
        "ttft_ms": long.result().timing.ttft_ms,
    }


async def decoded(engine: Engine, num_tokens: int) -> None:
    """Wait until the engine has produced `num_tokens` more tokens."""
    start = produced = (await engine.client.stats())["tokens_output_total"]
    while produced < start + num_tokens:
        await asyncio.sleep(0.01)
        produced = (await engine.client.stats())["tokens_output_total"]


def gaps(reply: EngineReply, begin_s: float, end_s: float) -> list[float]:
    """Return the gaps, in milliseconds, that overlap a span of time."""
    arrivals = reply.timing.arrivals_s
    pairs = zip(arrivals, reply.timing.itls_ms, strict=False)
    return [gap for start, gap in pairs if start < end_s and start + gap / 1000 > begin_s]


if __name__ == "__main__":
    present(__doc__, body)
