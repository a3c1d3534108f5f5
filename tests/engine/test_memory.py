"""How the pool is sized, and how memory limits are found."""

from pathlib import Path

import pytest

from engine.compute.memory import (
    default_pool_bytes,
    engine_config,
    gpu_pool_bytes,
    memory_bytes,
    pin_cap_blocks,
    pin_warning,
    quota_blocks,
)
from engine.config import EngineConfig
from engine.errors import KVCacheTooSmall

GIB = 2**30


def test_the_default_pool_is_15_percent_of_memory() -> None:
    assert default_pool_bytes(100 * GIB, GIB) == 15 * GIB


def test_the_default_pool_holds_at_least_eight_contexts() -> None:
    assert default_pool_bytes(100 * GIB, 3 * GIB) == 24 * GIB


def test_the_default_pool_never_takes_over_half_of_memory() -> None:
    assert default_pool_bytes(100 * GIB, 20 * GIB) == 50 * GIB


@pytest.mark.parametrize(
    ("num_blocks", "context_blocks", "cap"),
    [(1000, 100, 750), (1000, 400, 600), (100, 100, 0), (50, 100, 0), (4096, 512, 3072)],
)
def test_pins_leave_a_quarter_and_at_least_one_context(
    num_blocks: int, context_blocks: int, cap: int
) -> None:
    assert pin_cap_blocks(num_blocks, context_blocks) == cap


def test_the_quota_is_a_quarter_of_the_cap_unless_the_operator_says_otherwise() -> None:
    sizes = {
        "bytes_per_block": 1000,
        "max_model_len": 160,
        "vocab_size": 9,
        "memory_bytes": GIB,
        "kv_cache_bytes": 100_999,
    }

    config = engine_config(**sizes)
    limited = engine_config(**sizes, namespace_quota_blocks=5, max_num_seqs=3)

    assert (config.num_blocks, config.pin_cap_blocks, config.namespace_quota_blocks) == (
        100,
        75,
        18,
    )
    assert config.max_request_tokens == 160
    assert (limited.pin_cap_blocks, limited.namespace_quota_blocks) == (75, 5)
    assert limited.max_num_seqs == 3


@pytest.mark.parametrize(
    ("cap_blocks", "context_blocks", "quota"), [(400, 20, 100), (400, 150, 150), (60, 100, 60)]
)
def test_a_quota_is_enough_for_one_whole_context(
    cap_blocks: int, context_blocks: int, quota: int
) -> None:
    assert quota_blocks(cap_blocks, context_blocks) == quota


@pytest.mark.parametrize(
    ("cap_bytes", "quota_bytes", "cap", "quota"),
    [(30_999, None, 30, 10), (99_000, None, 90, 22), (50_000, 20_500, 50, 20), (0, 9_000, 0, 0)],
)
def test_cap_and_quota_are_given_in_bytes_and_one_context_stays_free(
    cap_bytes: int, quota_bytes: int | None, cap: int, quota: int
) -> None:
    config = engine_config(
        bytes_per_block=1000,
        max_model_len=160,
        vocab_size=9,
        memory_bytes=GIB,
        kv_cache_bytes=100_999,
        lease_cap_bytes=cap_bytes,
        lease_quota_bytes=quota_bytes,
    )

    assert (config.pin_cap_blocks, config.namespace_quota_blocks) == (cap, quota)
    assert (config.block_bytes, config.max_request_tokens) == (1000, 160)


def test_a_gpus_pool_is_what_the_weights_leave_of_its_share() -> None:
    assert gpu_pool_bytes(20 * GIB, 24 * GIB, 0.75) == 14 * GIB
    assert gpu_pool_bytes(5 * GIB, 24 * GIB, 0.75) == 0


def test_leases_that_could_pin_nothing_are_warned_of_with_a_cure_that_works() -> None:
    def config(**changes: int) -> EngineConfig:
        sizes = {"max_model_len": 160, "kv_cache_bytes": 9_000} | changes
        return engine_config(bytes_per_block=1000, vocab_size=9, memory_bytes=GIB, **sizes)

    warning = pin_warning(config())

    assert warning is not None
    assert warning.startswith("leases can pin nothing, since the KV pool of 144 tokens has no room")
    assert warning.endswith("start with --max-model-len 72 or --kv-cache-memory 20000")
    assert pin_warning(config(max_model_len=72)) is None
    assert pin_warning(config(kv_cache_bytes=20_000)) is None
    assert pin_warning(config(enable_prefix_caching=False)) is None


def test_a_pool_smaller_than_one_block_is_refused() -> None:
    with pytest.raises(KVCacheTooSmall, match="999 bytes; one block takes 1000"):
        engine_config(
            bytes_per_block=1000,
            max_model_len=160,
            vocab_size=9,
            memory_bytes=GIB,
            kv_cache_bytes=999,
        )


def machine(root: Path, files: dict[str, str]) -> Path:
    """A file system with 8 GiB of memory and these further files."""
    for name, text in ({"proc/meminfo": f"MemTotal: {8 * 2**20} kB\n"} | files).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_without_a_control_group_memory_is_the_machines(tmp_path: Path) -> None:
    assert memory_bytes(machine(tmp_path, {})) == 8 * GIB


@pytest.mark.parametrize(
    "files",
    [
        {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": f"{2 * GIB}\n"},
        {  # the limit of a parent holds too
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/b/memory.max": "max\n",
            "sys/fs/cgroup/a/memory.max": f"{2 * GIB}\n",
        },
        {  # inside a container the group's own folder is the root
            "proc/self/cgroup": "0::/not/visible/here\n",
            "sys/fs/cgroup/memory.max": f"{2 * GIB}\n",
        },
        {  # version 1 writes a huge number for no limit
            "proc/self/cgroup": "3:cpu:/x\n4:memory:/x\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/x/memory.limit_in_bytes": f"{2 * GIB}\n",
        },
    ],
    ids=["own", "parent", "container", "version 1"],
)
def test_a_control_groups_limit_is_respected(tmp_path: Path, files: dict[str, str]) -> None:
    assert memory_bytes(machine(tmp_path, files)) == 2 * GIB


def test_this_machines_memory_is_found() -> None:
    assert memory_bytes() > 2**28
