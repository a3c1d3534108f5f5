"""The engine's memory beyond weights and KV with 10,000 live leases (full: about 1 min).

Each lease pins one block of its own. What is left of the process's own memory, once weights and
pinned blocks are taken off, is Python, torch and the bookkeeping. Mapped files (libraries, the
weights' file) are shown apart: the kernel may drop their pages at any time.
"""

import asyncio
import random
from pathlib import Path

from bench.counts import BenchError
from bench.engines import Engine, request, warm_up
from bench.exhibit import Options, present
from bench.exhibit_result import ExhibitResult, Plot
from bench.machine import resident_bytes
from bench.workloads import token_ids
from engine.client import Breakpoint

TTL_MS = 3_600_000
MOST_MB = 300
AT_ONCE = 256
SPARE_BLOCKS = 1_024  # a whole context and some


async def body(options: Options) -> ExhibitResult:
    """Memory before the leases, and with all of them."""
    num_leases = 200 if options.quick else 10_000
    block_bytes = await measure_block(options)
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


async def measure_block(options: Options, *flags: str) -> int:
    """Bytes of one KV block, asked of an engine that is not measured."""
    async with Engine(options.model, *flags) as engine:
        await engine.ask(request(token_ids(random.Random(0), 16), 0, breakpoints=(mark(16),)))
        stats = await engine.client.stats()
        return int(stats["kv_bytes_pinned"] // stats["kv_blocks_pinned"])


async def pin(engine: Engine, num_leases: int) -> None:
    """As many different leases, some hundred at a time."""
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
    """A lease for an hour, in memory only."""
    return Breakpoint(tokens, TTL_MS, write=True)


def weights_bytes(options: Options, dtype: str) -> int:
    """The model's parameters in the engine's number format; the files hold float32."""
    folder: Path = options.model
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return stored // 2 if dtype == "bfloat16" else stored


if __name__ == "__main__":
    present(__doc__, body)
