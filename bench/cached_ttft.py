"""Time to the first token on the engine's link: cold, warm by tier, and a control (4 min).

Each arm of each prefix length runs at least 20 times, in random order. *cold* writes a fresh
prefix, *device* reads it from the KV pool, *disk* reads it after a restart of the engine. *control*
computes a fresh prompt between them: if its time differs from cold's by more than a quarter, the
machine changed during the run and no speed-up is printed. The engine's record must confirm what
each arm read.
"""

import asyncio
import random
from collections import defaultdict
from itertools import product
from statistics import median
from typing import Any

from bench.engines import Engine, EngineReply, request, warm_up
from bench.errors import BenchError
from bench.exhibit import Options, present
from bench.exhibit_result import ExhibitResult, Plot
from bench.timing import median_interval, percentile
from bench.workloads import token_ids
from engine.client import Breakpoint

SUFFIX_TOKENS = 64
TTL_MS = 3_600_000
CONTROL_MOVES_MOST = 0.25
Times = defaultdict[tuple[int, str], list[float]]


async def body(options: Options) -> ExhibitResult:
    """Measure the KV pool on one engine, then the disk after its restart."""
    lengths, rounds = ([256, 1_024], 2) if options.quick else ([256, 1_024, 2_048, 3_072], 20)
    chance = random.Random("cached ttft")
    times: Times = defaultdict(list)
    async with Engine(options.model) as engine:
        if max(lengths) + SUFFIX_TOKENS >= engine.info.max_model_len:
            raise BenchError(f"the model's context is too short: {engine.info.max_model_len}")
        await warm_up(engine)
        await measure_pool(engine, lengths, rounds, chance, times)
        await measure_disk(engine, lengths, rounds, chance, times)
    return tell(lengths, rounds, times)


async def measure_pool(
    engine: Engine, lengths: list[int], rounds: int, chance: random.Random, times: Times
) -> None:
    """Measure cold, device and control; the first round is not counted."""
    for number in range(rounds + 1):
        for length in chance.sample(lengths, len(lengths)):
            arms = ["cold", "device"]
            arms.insert(chance.randrange(3), "control")
            prefix = token_ids(chance, length)
            for arm in arms:
                other = token_ids(chance, length) if arm == "control" else prefix
                reply = await ask(engine, other, arm, chance)
                if number > 0:
                    times[length, arm].append(reply.timing.ttft_ms)
            await engine.client.unpin(namespaces=[b"bench"])


async def measure_disk(
    engine: Engine, lengths: list[int], rounds: int, chance: random.Random, times: Times
) -> None:
    """Write persistent leases, restart, and read each once, with controls in between."""
    tasks = list(product(lengths, range(rounds + 1)))
    chance.shuffle(tasks)
    prefixes = {task: token_ids(chance, task[0]) for task in tasks}
    for prefix in prefixes.values():
        await ask(engine, prefix, "cold", chance, persist=True)
        await saved(engine)
    await engine.restart()
    await warm_up(engine)
    uncounted = {(length, rounds) for length in lengths}
    for task in tasks:
        for arm in chance.sample(["disk", "disk control"], 2):
            prefix = prefixes[task] if arm == "disk" else token_ids(chance, task[0])
            reply = await ask(engine, prefix, arm, chance)
            if task not in uncounted:
                times[task[0], arm].append(reply.timing.ttft_ms)


async def ask(
    engine: Engine, prefix: bytes, arm: str, chance: random.Random, *, persist: bool = False
) -> EngineReply:
    """Send one request of an arm and check in its record what it read."""
    length = len(prefix) // 4
    reads = arm in ("device", "disk")
    mark = Breakpoint(length, TTL_MS, write=not reads, persist=persist)
    reply = await engine.ask(
        request(
            prefix + token_ids(chance, SUFFIX_TOKENS),
            1,
            read_tokens=length if reads else 0,
            breakpoints=() if "control" in arm else (mark,),
        )
    )
    facts = reply.served_record
    expected = {arm: length} if reads else {}
    refused = [grant.reason for grant in facts.grants if grant.outcome == "refused"]
    if facts.reads_by_tier != expected or refused:
        raise BenchError(f"{arm} of {length}: read {facts.reads_by_tier}, refused {refused}")
    return reply


async def saved(engine: Engine) -> None:
    """Wait until every lease is on disk. Raises BenchError if one could not be saved."""
    is_saved = False
    while not is_saved:
        stats = await engine.client.stats()
        if stats["lease_files_failed_total"] or stats["lease_saves_skipped_total"]:
            raise BenchError("a lease did not get onto the disk")
        is_saved = stats["lease_files"] == stats["leases_live"]
        await asyncio.sleep(0 if is_saved else 0.02)


def tell(lengths: list[int], rounds: int, times: Times) -> ExhibitResult:
    """Return the table, a line an arm, with a speed-up where the control allows it."""
    result = ExhibitResult(
        f"Time to first token by prefix length and tier, {rounds} times each",
        [f"fixed: prefixes of {', '.join(map(str, lengths))}, suffix {SUFFIX_TOKENS}, 1 out"],
        ("prefix, arm", "p50 ms", "95 % interval", "p95 ms", "faster than cold"),
    )
    arms = ("cold", "device", "disk", "control", "disk control")
    for length in lengths:
        for arm in arms:
            values = times[length, arm]
            low, high = median_interval(values)
            result.rows.append((
                f"{length:,}, {arm}", median(values), f"{low:,.0f} to {high:,.0f}",
                percentile(values, 95), speed_up(times, length, arm),
            ))  # fmt: skip
    result.figures = {f"{length} {arm}": values for (length, arm), values in times.items()}
    lines: dict[str, list[tuple[float | str, float]]] = {
        arm: [(length, median(times[length, arm])) for length in lengths] for arm in arms
    }
    result.plot = Plot("lines", "prefix tokens", "time to first token, p50 ms", lines)
    return result


def speed_up(times: Any, length: int, arm: str) -> str:
    """Return cold time over warm time, or "void" if the arm's control moved."""
    if arm not in ("device", "disk"):
        return ""
    cold = median(times[length, "cold"])
    control = median(times[length, "control" if arm == "device" else "disk control"])
    if abs(control / cold - 1) > CONTROL_MOVES_MOST:
        return f"void: control moved to {control / cold:.2f}"
    return f"{cold / median(times[length, arm]):.1f}"


if __name__ == "__main__":
    present(__doc__, body)
