"""Sizes the KV pool, and limits how much of it leases may pin."""

from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.errors import KVCacheTooSmall

POOL_SHARE_PERCENT = 15
POOL_SHARE_PERCENT_MAX = 50  # however long the model's context is
POOL_CONTEXTS_MIN = 8
PIN_CAP_PERCENT = 75
QUOTA_PERCENT = 25  # of the cap


def engine_config(
    *,
    bytes_per_block: int,
    max_model_len: int,
    vocab_size: int,
    memory_bytes: int,
    kv_cache_bytes: int | None = None,
    lease_cap_bytes: int | None = None,
    lease_quota_bytes: int | None = None,
    block_size: int = 16,
    **limits: Any,
) -> EngineConfig:
    """Return the engine's limits on a machine with `memory_bytes`.

    kv_cache_bytes     size of the KV pool; None: `default_pool_bytes`
    lease_cap_bytes    how much of it all leases may pin; None: `pin_cap_blocks`. One whole context
                       stays free, however large the cap
    lease_quota_bytes  how much the leases of one namespace may pin; None: `quota_blocks`
    limits             further fields of EngineConfig

    Raises KVCacheTooSmall if not one block fits.
    """
    context_blocks = -(-max_model_len // block_size)
    if kv_cache_bytes is None:
        kv_cache_bytes = default_pool_bytes(memory_bytes, context_blocks * bytes_per_block)
    num_blocks = kv_cache_bytes // bytes_per_block
    if num_blocks < 1:
        raise KVCacheTooSmall(kv_cache_bytes, bytes_per_block)
    cap_blocks = pin_cap_blocks(num_blocks, context_blocks)
    if lease_cap_bytes is not None:
        num_unreserved = max(0, num_blocks - context_blocks)
        cap_blocks = min(lease_cap_bytes // bytes_per_block, num_unreserved)
    quota = quota_blocks(cap_blocks, context_blocks)
    if lease_quota_bytes is not None:
        quota = min(lease_quota_bytes // bytes_per_block, cap_blocks)
    derived = {"pin_cap_blocks": cap_blocks, "namespace_quota_blocks": quota}
    return EngineConfig(
        block_size=block_size,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        block_bytes=bytes_per_block,
        **(derived | limits),
    )


def default_pool_bytes(memory_bytes: int, context_bytes: int) -> int:
    """Return 15 % of memory or eight whole contexts if that is more, at most half of memory."""
    share = memory_bytes * POOL_SHARE_PERCENT // 100
    ceiling = memory_bytes * POOL_SHARE_PERCENT_MAX // 100
    return min(max(share, POOL_CONTEXTS_MIN * context_bytes), ceiling)


def gpu_pool_bytes(free_bytes: int, total_bytes: int, utilization: float) -> int:
    """Return what a GPU's weights leave of its `utilization` for the KV pool, at least 0.

    `free_bytes` is what is free with the weights loaded; what others use counts as used.
    """
    return max(0, free_bytes - round((1 - utilization) * total_bytes))


def pin_warning(config: EngineConfig) -> str | None:
    """Return a sentence with the cure if leases could pin nothing, else None."""
    if not config.enable_prefix_caching or config.pin_cap_blocks > 0:
        return None
    pool_tokens = config.num_blocks * config.block_size
    wanted_bytes = 2 * config.blocks_for(config.max_model_len) * config.block_bytes
    return (
        f"leases can pin nothing, since the KV pool of {pool_tokens} tokens has no room beside one "
        f"context of {config.max_model_len}: start with --max-model-len {pool_tokens // 2} or "
        f"--kv-cache-memory {wanted_bytes}"
    )


def pin_cap_blocks(num_blocks: int, context_blocks: int) -> int:
    """Return 75 % of the pool, or less so that one whole context stays free."""
    return max(0, min(num_blocks * PIN_CAP_PERCENT // 100, num_blocks - context_blocks))


def quota_blocks(cap_blocks: int, context_blocks: int) -> int:
    """Return a quarter of the cap, or more so that one whole context can be leased."""
    return min(max(cap_blocks * QUOTA_PERCENT // 100, context_blocks), cap_blocks)


def memory_bytes(root: Path = Path("/")) -> int:
    """Return the memory this process may use: the machine's, or less by its control group."""
    machine = _meminfo_bytes((root / "proc/meminfo").read_text(encoding="utf-8"))
    return min([machine, *_cgroup_limits(root)])


def _meminfo_bytes(meminfo: str) -> int:
    (line,) = (line for line in meminfo.splitlines() if line.startswith("MemTotal:"))
    return int(line.split()[1]) * 1024


def _cgroup_limits(root: Path) -> list[int]:
    """Return the limits of the process's control group and its parents (version 2 or 1)."""
    membership = root / "proc/self/cgroup"
    if not membership.is_file():
        return []
    limits: list[str] = []
    for line in membership.read_text(encoding="utf-8").splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            top, file_name = root / "sys/fs/cgroup", "memory.max"
        elif controllers == "memory":
            top, file_name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        group = top / name.lstrip("/")
        folders = [group, *(folder for folder in group.parents if folder.is_relative_to(top))]
        files = [folder / file_name for folder in folders if (folder / file_name).is_file()]
        limits += [file.read_text(encoding="utf-8").strip() for file in files]
    return [int(limit) for limit in limits if limit != "max"]
