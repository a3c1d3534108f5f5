"""Measures prefill, memory and disk rates at start: what decides when a copy is read back."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from engine.config import EngineConfig
from engine.plan import BlockLoad, Plan, Row, Runner
from engine.protocol import Sampling
from engine.tiers.tier import Snapshot

PROBE_TOKENS = 256
NUM_PREFILLS = 3
PROBE_BYTES = 16 << 20
_CHUNK_BYTES = 1 << 20


def prefill_tokens_per_second(
    runner: Runner, config: EngineConfig, clock_ns: Callable[[], int]
) -> float:
    """Return the prefill rate. Overwrites the pool's first blocks: call before the pool is used."""
    num_tokens = min(PROBE_TOKENS, config.max_request_tokens, config.max_num_batched_tokens)
    token_ids = (np.arange(num_tokens) % config.vocab_size).astype(np.int32)
    row = Row(
        request_id="probe",
        namespace=b"probe",
        token_ids=token_ids,
        start=0,
        block_table=np.arange(config.blocks_for(num_tokens), dtype=np.int32),
        samples=True,  # sampling waits for the device
        sampling=Sampling(temperature=0.0),
        output_index=0,
    )
    plan = Plan((), (row,))
    times_ns = []
    for _ in range(NUM_PREFILLS):  # the first one warms up; the fastest is least disturbed
        started_ns = clock_ns()
        runner.execute(plan)
        times_ns.append(clock_ns() - started_ns)
    return num_tokens * 1e9 / max(1, min(times_ns))


def fill_bytes_per_second(
    runner: Runner, snapshot: Snapshot, config: EngineConfig, clock_ns: Callable[[], int]
) -> float:
    """Return the rate of writing a payload from memory to the pool. Overwrites blocks."""
    num_blocks = min(config.num_blocks, max(1, PROBE_BYTES // config.block_bytes))
    blocks = tuple(range(num_blocks))
    payload = snapshot(blocks, num_blocks * config.block_size)
    started_ns = clock_ns()
    runner.execute(Plan((), (), (BlockLoad(blocks, payload, skip=0),)))
    snapshot(blocks[:1], 1)  # waits for the device
    return num_blocks * config.block_bytes * 1e9 / max(1, clock_ns() - started_ns)


def disk_bytes_per_second(folder: Path, clock_ns: Callable[[], int]) -> float:
    """Return the rate of reading and hashing a file from disk, past the page cache.

    Raises OSError if the folder is not writable.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / "probe.tmp"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        chunk = os.urandom(_CHUNK_BYTES)
        for _ in range(PROBE_BYTES // _CHUNK_BYTES):
            os.write(fd, chunk)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.lseek(fd, 0, os.SEEK_SET)
        started_ns = clock_ns()
        digest = hashlib.sha256()
        while data := os.read(fd, _CHUNK_BYTES):
            digest.update(data)
        return PROBE_BYTES * 1e9 / max(1, clock_ns() - started_ns)
    finally:
        os.close(fd)
        path.unlink()
