"""Checks of an idle engine, and samples of its memory, files and leases."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from bench.engines import Engine
from bench.errors import BenchError
from bench.machine import resident_bytes

IDLE_SECONDS = 10  # after the last response, until no request is left and all files are written
NOTHING = (
    "num_requests_running", "num_requests_waiting", "num_requests_deferred", "kv_blocks_reserved",
    "kv_slots_reserved", "kv_slots_live", "steps_failed_total", "steps_stalled_total",
    "lease_lost_total", "lease_dropped_total", "lease_files_corrupt_total",
    "lease_files_failed_total",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sample:
    """What an idle engine uses of its machine at one moment."""

    minute: float
    own_mb: float
    mapped_mb: float
    num_files_open: int
    journal_mb: float
    leases_mb: float
    leases_live: int
    pinned: int


def check_idle(stats: Mapping[str, float], *, pin_cap: int) -> None:
    """Check that only pins are in use and that the blocks add up. Raises BenchError."""
    if left := {name: stats[name] for name in NOTHING if stats[name]}:
        raise BenchError(f"an idle engine has {left}")
    free, evictable, pinned, total = (
        int(stats[f"kv_blocks_{kind}"]) for kind in ("free", "evictable", "pinned", "total")
    )
    if free + evictable + pinned != total:
        raise BenchError(f"blocks leak: {free} free + {evictable} cached + {pinned} pinned"
                         f" are not {total}")  # fmt: skip
    if pinned > pin_cap:
        raise BenchError(f"{pinned} blocks pinned of {pin_cap}")


async def take_sample(engine: Engine, start_s: float) -> Sample:
    """Wait until the engine is idle, check it, and return a sample."""
    stats = await wait_idle(engine)
    check_idle(stats, pin_cap=engine.info.pin_cap_blocks)
    return measure(engine, stats, minute=(perf_counter() - start_s) / 60)


def measure(engine: Engine, stats: Mapping[str, float], *, minute: float) -> Sample:
    """Return what the engine uses of its machine now."""
    return Sample(
        minute=round(minute, 3),
        own_mb=round(resident_bytes(engine.pid, "RssAnon") / 1e6, 2),
        mapped_mb=round(resident_bytes(engine.pid, "RssFile") / 1e6, 2),
        num_files_open=len(list(Path(f"/proc/{engine.pid}/fd").iterdir())),
        journal_mb=round(folder_bytes(engine.folder / "engine" / "journal") / 1e6, 3),
        leases_mb=round(folder_bytes(engine.folder / "engine" / "leases") / 1e6, 3),
        leases_live=int(stats["leases_live"]),
        pinned=int(stats["kv_blocks_pinned"]),
    )


async def wait_idle(engine: Engine) -> dict[str, float]:
    """Wait for no request and for written lease files; return the engine's stats then."""
    deadline_s = perf_counter() + IDLE_SECONDS
    while True:
        stats = await engine.client.stats()
        num_busy = stats["num_requests_running"] + stats["num_requests_waiting"]
        num_files = len(list((engine.folder / "engine" / "leases").glob("*.lease")))
        if not num_busy and num_files == stats["lease_files"]:
            return stats
        if perf_counter() > deadline_s:
            raise BenchError(
                f"not idle {IDLE_SECONDS} s after the last response: {num_busy:.0f} requests, "
                f"{num_files} lease files for {stats['lease_files']:.0f} stored leases"
            )
        await asyncio.sleep(0.1)


def folder_bytes(folder: Path) -> int:
    """Return the bytes in a folder's files; a file removed meanwhile counts as 0."""
    total = 0
    for path in folder.iterdir():
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total
