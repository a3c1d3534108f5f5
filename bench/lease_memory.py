"""The engine's memory beyond weights and KV with 10,000 live leases (full: about 1 min).

Each lease pins one block of its own. The figure is the process's anonymous memory minus weights and
pinned blocks: Python, torch and the bookkeeping. Mapped files (libraries, the weights file) are a
line of their own, since the kernel may drop their pages at any time.
"""

import asyncio
import random
from pathlib import Path

from bench.engines import Engine, measure_block_bytes, request, warm_up
from bench.errors import BenchError
from bench.exhibit import Options, present
from bench.exhibit_result import ExhibitResult, Plot
from bench.machine import resident_bytes
from bench.workloads import token_ids
from engine.client import Breakpoint

TTL_MS = 3_600_000
MOST_MB = 300
AT_ONCE = 256
SPARE_BLOCKS = 1_024  # one context, with a margin


async def body(options: Options) -> ExhibitResult:
    """Measure memory before the leases and with all of them."""
    num_leases = 200 if options.quick else 10_000
    block_bytes = await measure_block_bytes(options.model)
    pool = (num_leases + SPARE_BLOCKS) * block_bytes
    flags = ("--kv-cache-memory", str(pool), "--lease-cap-bytes", str(num_leases * block_bytes))
    async with Engine(options.model, *flags) as engine:
        await warm_up(engine)
        before = resident_bytes(engine.pid, "RssAnon")
        await pin(engine, num_leases)
        after, files = (resident_bytes(engine.pid, kind) for kind in ("RssAnon", "RssFile"))
        stats = await engine.client.stats()
        weights = weights_bytes(options, engine.info.dtype)
    if stats["leases_live"] != num_leases:
        raise BenchError(f"{stats['leases_live']:.0f} leases live of {num_leases}")
    kv = int(stats["kv_blocks_pinned"]) * block_bytes
    rest = after - weights - kv
    result = ExhibitResult(
        f"Engine memory with {num_leases:,} live leases",
        [f"fixed: {num_leases} x one block in, nothing out"],
        ("part", "MB", "at most"),
    )
    parts = {
        "own memory before the leases": before,
        "own memory with them": after,
        "weights": weights,
        "KV of the leases": kv,
        "beyond weights and KV": rest,
        "of which came with the leases": after - before - kv,
        "mapped files": files,
    }
    for part, num_bytes in parts.items():
        limit = f"{MOST_MB}" if part.startswith("beyond") else ""
        result.rows.append((part, round(num_bytes / 1e6, 1), limit))
    result.figures = parts
    points: list[tuple[float | str, float]] = [
        (name, parts[name] / 1e6)
        for name in ("weights", "KV of the leases", "beyond weights and KV")
    ]
    result.plot = Plot("bars", "", "MB", {"resident": points})
    return result


async def pin(engine: Engine, num_leases: int) -> None:
    """Create leases of different prefixes, AT_ONCE requests at a time."""
    chance = random.Random("lease memory")
    size = engine.info.block_size
    gate = asyncio.Semaphore(AT_ONCE)

    async def one() -> None:
        async with gate:
            reply = await engine.ask(request(token_ids(chance, size), 0, breakpoints=(mark(size),)))
        if reply.served_record.grants[0].outcome != "granted":
            raise BenchError(f"a lease was {reply.served_record.grants[0]}")

    async with asyncio.TaskGroup() as group:
        for _ in range(num_leases):
            group.create_task(one())


def mark(tokens: int) -> Breakpoint:
    """Return a breakpoint that asks for a lease of one hour, in memory only."""
    return Breakpoint(tokens, TTL_MS, write=True)


def weights_bytes(options: Options, dtype: str) -> int:
    """Return the bytes of the parameters in the engine's dtype; the files hold float32."""
    folder: Path = options.model
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return stored // 2 if dtype == "bfloat16" else stored


if __name__ == "__main__":
    present(__doc__, body)
