"""Half an hour of random load at a full pin cap: no leak and no hang (full: 30 min).

Five tenants share a small pool. Their leases, persistent or not, nest, expire, are refused, spill
to disk, are restored and unpinned. A fifth of the requests is aborted in a random state, and now
and then a link is closed. Every half minute or so the load pauses until the engine is idle. Then
all blocks must be free, cached or pinned, no gauge may count a request, and the journal must agree
with every client; memory, open files and folders are measured. A run of 15 minutes or more also
fails if memory grows after the first five minutes.
"""

import argparse
import json
import random
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from time import perf_counter

from bench.engines import Engine, measure_block_bytes
from bench.errors import BenchError
from bench.exhibit import Options, present
from bench.exhibit_result import ExhibitResult, Plot
from bench.flatness import (
    LEAST_MINUTES,
    MOST_MB_PER_HOUR,
    MOST_STEP_MB,
    find_growth,
    settled,
    slope_per_hour,
    step_between_thirds,
)
from bench.idle import Sample, check_idle, take_sample, wait_idle
from bench.mix import Mix
from bench.traffic import Tally, Traffic

CONTEXT_TOKENS, BLOCK_TOKENS = 1_024, 16
CONTEXT_BLOCKS = CONTEXT_TOKENS // BLOCK_TOKENS
CAP_BLOCKS, QUOTA_BLOCKS, DISK_BLOCKS = 48, 22, 160
QUEUE_WAIT_SECONDS = 8
AT_ONCE, MAX_NUM_SEQS, STEP_TOKENS = 16, 8, 256
MOST_MORE_FILES = 2  # the lease writer's file, and a journal file that is being replaced


async def body(options: Options) -> ExhibitResult:
    """Load one engine and let it idle, alternately."""
    chance = random.Random(options.seed)
    minutes = 0.2 if options.quick else options.minutes
    with tempfile.TemporaryDirectory(prefix="kvmeter-soak-") as folder:
        model = with_short_context(options.model, Path(folder) / options.model.name)
        block_bytes = await measure_block_bytes(model, "--dtype", options.dtype)
        async with Engine(model, "--dtype", options.dtype, *flags(block_bytes)) as engine:
            mix = Mix(chance, context_tokens=CONTEXT_TOKENS)
            traffic = Traffic(engine, mix, chance, queue_wait_seconds=QUEUE_WAIT_SECONDS)
            try:
                samples = await soak(engine, traffic, chance, minutes=minutes)
                stats = await unpin_everything(engine, traffic)
            finally:
                await traffic.close()
    points = [(sample.minute, sample.own_mb) for sample in samples]
    check_files(samples)
    is_judged = samples[-1].minute >= LEAST_MINUTES
    result = ExhibitResult(
        f"Soak, {samples[-1].minute:.0f} min at the pin cap, seed {options.seed}",
        [f"random: 1 to {CONTEXT_TOKENS + 60} in, 0 to 200 out, {AT_ONCE} clients"],
        ("what", "count"),
    )
    result.rows = [*rows(traffic, samples, stats)]
    if is_judged:
        slope = slope_per_hour(settled(points))
        step = step_between_thirds(points)
        result.fault = find_growth(points) or find_missing_coverage(traffic.tally, stats)
        result.rows.append((f"own memory, MB an hour (at most {MOST_MB_PER_HOUR})", slope))
        result.rows.append((f"last third above the middle, MB (at most {MOST_STEP_MB})", step))
    else:
        result.notes.append(f"memory is not judged in less than {LEAST_MINUTES} minutes")
    result.figures = {"tally": plain(traffic.tally), "stats": stats,
                      "samples": [asdict(sample) for sample in samples]}  # fmt: skip
    result.plot = Plot("lines", "minutes", "MB, blocks", {
        "own memory, MB": list(points),
        "pinned blocks": [(sample.minute, sample.pinned) for sample in samples],
        "lease files, MB": [(sample.minute, sample.leases_mb) for sample in samples],
    })  # fmt: skip
    return result


def flags(block_bytes: int) -> tuple[str, ...]:
    """Return flags for a pool of the pin cap and one context, which a few requests fill."""
    sizes = {
        "--kv-cache-memory": (CONTEXT_BLOCKS + CAP_BLOCKS) * block_bytes,
        "--lease-cap-bytes": CAP_BLOCKS * block_bytes,
        "--lease-quota-bytes": QUOTA_BLOCKS * block_bytes,
        "--lease-disk-bytes": DISK_BLOCKS * block_bytes,
        "--max-num-seqs": MAX_NUM_SEQS,
        "--max-num-batched-tokens": STEP_TOKENS,
        "--max-queue-wait-seconds": QUEUE_WAIT_SECONDS,
        "--block-size": BLOCK_TOKENS,
    }
    return tuple(str(each) for pair in sizes.items() for each in pair)


def with_short_context(model: Path, folder: Path) -> Path:
    """Write the model's folder with a context of CONTEXT_TOKENS, so that a small pool serves it."""
    folder.mkdir()
    for path in model.iterdir():
        if path.name == "config.json":
            config = json.loads(path.read_text(encoding="utf-8"))
            config["max_position_embeddings"] = CONTEXT_TOKENS
            (folder / path.name).write_text(json.dumps(config), encoding="utf-8")
        elif path.suffix == ".safetensors" or path.name == "generation_config.json":
            (folder / path.name).symlink_to(path.absolute())
    return folder


async def soak(
    engine: Engine, traffic: Traffic, chance: random.Random, *, minutes: float
) -> list[Sample]:
    """Alternate load and idle moments; return a sample of each idle moment."""
    start_s = perf_counter()
    samples: list[Sample] = []
    while (left_s := start_s + 60 * minutes - perf_counter()) > 0:
        seconds = min(left_s, chance.uniform(3, min(45.0, 20 * minutes)))
        await traffic.run(seconds, at_once=AT_ONCE)
        samples.append(await take_sample(engine, start_s))
        await traffic.check_ended()
    return samples


async def unpin_everything(engine: Engine, traffic: Traffic) -> dict[str, float]:
    """Unpin every lease and check that no tier keeps anything. Raises BenchError."""
    await traffic.unpin_all()
    stats = await wait_idle(engine)
    check_idle(stats, pin_cap=0)
    if stats["leases_live"] or stats["lease_files"] or stats["lease_disk_bytes"]:
        raise BenchError(f"leases outlive their unpin: {stats}")
    return stats


def find_missing_coverage(tally: Tally, stats: Mapping[str, float]) -> str | None:
    """Return which part of the lease code the load never reached, or None."""
    counts = {
        "the cap was never full": tally.num_probes_full,
        "no lease was refused for the cap": tally.grants["capacity"],
        "no spilled lease was unpinned": stats["lease_given_up_total"],
        "no lease was read from disk": stats["lease_files_read_total"],
        "no lease expired": stats["lease_expired_total"],
        "no request was preempted": stats["preemptions_total"],
    }
    return next((fault for fault, count in counts.items() if not count), None)


def check_files(samples: Sequence[Sample]) -> None:
    """Check that the number of open files does not grow. Raises BenchError."""
    first = samples[0].num_files_open
    if (most := max(sample.num_files_open for sample in samples)) > first + MOST_MORE_FILES:
        raise BenchError(f"{most} files open at idle, {first} at first")


def rows(
    traffic: Traffic, samples: Sequence[Sample], stats: dict[str, float]
) -> list[tuple[str, float | str]]:
    """Return the rows of the table."""
    tally = traffic.tally
    answered = sum(tally.outcomes.values())
    table: list[tuple[str, float | str]] = [("requests", answered), ("idle moments", len(samples))]
    table += [(f"ended: {name}", n) for name, n in sorted(tally.outcomes.items())]
    table += [(f"aborted in {state}", n) for state, n in sorted(tally.aborts.items())]
    table += [(f"breakpoints: {name}", n) for name, n in sorted(tally.grants.items())]
    table += [
        ("cap nine tenths full, share of probes", tally.num_probes_full / max(1, tally.num_probes)),
        ("leases unpinned", tally.num_unpinned), ("links ended", tally.num_relinks),
        ("longest wait for admission, s", tally.longest_queue_s),
        ("longest abort, s", tally.longest_abort_s),
        ("longest wait between two steps, s", tally.longest_probe_s),
    ]  # fmt: skip
    names = ("lease_expired_total", "lease_given_up_total", "lease_files_read_total",
             "lease_saves_skipped_total", "preemptions_total", "deferrals_total",
             "steps_total", "prefix_tokens_lease_read_total")  # fmt: skip
    table += [(name, int(stats[name])) for name in names if name in stats]
    for near in dict.fromkeys(nearest(samples, minute) for minute in (0, 5, 15, 30)):
        table.append((
            f"at {near.minute:.1f} min: own MB, mapped MB, files, journal MB, leases MB",
            f"{near.own_mb}, {near.mapped_mb}, {near.num_files_open}, {near.journal_mb}, "
            f"{near.leases_mb}",
        ))  # fmt: skip
    return table


def nearest(samples: Sequence[Sample], minute: int) -> Sample:
    """Return the sample taken closest to a minute of the run."""
    return min(samples, key=lambda sample: abs(sample.minute - minute))


def plain(tally: Tally) -> dict[str, object]:
    """Return the tally as plain values for JSON."""
    values = {each.name: getattr(tally, each.name) for each in fields(tally)}
    return {name: dict(v) if isinstance(v, Counter) else v for name, v in values.items()}


def extend(parser: argparse.ArgumentParser) -> None:
    """Add the exhibit's own flags."""
    parser.add_argument("--minutes", type=float, default=30.0, metavar="MINUTES")
    parser.add_argument("--dtype", default="auto", metavar="{auto,float32,bfloat16}")
    parser.add_argument("--seed", type=int, default=1, metavar="N")


if __name__ == "__main__":
    present(__doc__, body, extend=extend)
