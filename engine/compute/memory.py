"""How large the KV pool is, and how much of it leases may pin."""

from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.errors import KVCacheTooSmall

POOL_SHARE_PERCENT = 15
POOL_SHARE_PERCENT_MAX = 50  # however long the model's context is
POOL_CONTEXTS_MIN = 8
PIN_CAP_PERCENT = 75


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
    """The engine's limits on a machine with `memory_bytes`, pins and quota derived from the pool.

    `kv_cache_bytes` is the operator's pool, `lease_cap_bytes` what all leases may pin of it and
    `lease_quota_bytes` what those of one namespace may; None takes the default. However large the
    cap, one whole context stays free. `limits` are further fields of EngineConfig. Raises
    KVCacheTooSmall if not one block fits.
    """
    context_blocks = -(-max_model_len // block_size)
    if kv_cache_bytes is None:
        kv_cache_bytes = default_pool_bytes(memory_bytes, context_blocks * bytes_per_block)
    num_blocks = kv_cache_bytes // bytes_per_block
    if num_blocks < 1:
        raise KVCacheTooSmall(kv_cache_bytes, bytes_per_block)
    cap_blocks = pin_cap_blocks(num_blocks, context_blocks)
    if lease_cap_bytes is not None:
        room_blocks = max(0, num_blocks - context_blocks)
        cap_blocks = min(lease_cap_bytes // bytes_per_block, room_blocks)
    quota_blocks = cap_blocks
    if lease_quota_bytes is not None:
        quota_blocks = min(lease_quota_bytes // bytes_per_block, cap_blocks)
    derived = {"pin_cap_blocks": cap_blocks, "namespace_quota_blocks": quota_blocks}
    return EngineConfig(
        block_size=block_size,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        block_bytes=bytes_per_block,
        **(derived | limits),
    )


def default_pool_bytes(memory_bytes: int, context_bytes: int) -> int:
    """15 % of memory, but at least eight whole contexts, but never above half of memory."""
    share = memory_bytes * POOL_SHARE_PERCENT // 100
    ceiling = memory_bytes * POOL_SHARE_PERCENT_MAX // 100
    return min(max(share, POOL_CONTEXTS_MIN * context_bytes), ceiling)


def pin_cap_blocks(num_blocks: int, context_blocks: int) -> int:
    """75 % of the pool, but always one whole context less than the pool."""
    return max(0, min(num_blocks * PIN_CAP_PERCENT // 100, num_blocks - context_blocks))


def memory_bytes(root: Path = Path("/")) -> int:
    """Memory this process may use: the machine's, or its control group's limit if that is less."""
    machine = _meminfo_bytes((root / "proc/meminfo").read_text(encoding="utf-8"))
    return min([machine, *_cgroup_limits(root)])


def _meminfo_bytes(meminfo: str) -> int:
    (line,) = (line for line in meminfo.splitlines() if line.startswith("MemTotal:"))
    return int(line.split()[1]) * 1024


def _cgroup_limits(root: Path) -> list[int]:
    """The limits of the process's control group and its parents (version 2, then version 1)."""
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
