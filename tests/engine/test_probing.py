"""What the engine measures at its start, on the tiny model and a clock that is moved by hand."""

from itertools import count

import pytest
import torch

from engine.compute.kv_cache import bytes_per_block
from engine.compute.loading import load_model
from engine.compute.model_runner import ModelRunner
from engine.config import EngineConfig
from engine.tiers.lease_files import Origin
from engine.tiers.open_store import open_lease_store
from engine.tiers.probing import (
    PROBE_BYTES,
    disk_bytes_per_second,
    fill_bytes_per_second,
    prefill_tokens_per_second,
)


@pytest.fixture(scope="module")
def runner_and_config(tiny_folder):
    model = load_model(tiny_folder, dtype=torch.float32, device=torch.device("cpu")).backend
    config = EngineConfig(
        num_blocks=8,
        max_model_len=64,
        vocab_size=49152,
        pin_cap_blocks=4,
        namespace_quota_blocks=4,
        block_bytes=bytes_per_block(model.shape, model.dtype, 16),
    )
    return ModelRunner(model, config, entropy=bytes(32)), config


def seconds():
    """A clock on which every look takes a second."""
    return count(step=1_000_000_000).__next__


def test_a_rate_is_an_amount_over_the_time_that_it_took(runner_and_config, tmp_path):
    runner, config = runner_and_config

    assert prefill_tokens_per_second(runner, config, seconds()) == config.max_request_tokens
    fill = fill_bytes_per_second(runner, runner.snapshot, config, seconds())
    assert fill == config.num_blocks * config.block_bytes
    assert disk_bytes_per_second(tmp_path / "leases", seconds()) == PROBE_BYTES
    assert list((tmp_path / "leases").iterdir()) == []


@pytest.mark.parametrize("is_folder", [True, False])
def test_an_engine_starts_whether_or_not_its_lease_folder_can_be(
    runner_and_config, tmp_path, is_folder
):
    runner, config = runner_and_config
    folder = tmp_path / "leases"
    if not is_folder:
        folder.write_text("a file")

    with open_lease_store(
        folder,
        runner,
        config,
        Origin("w", "float32", runner.kv_layout),
        host_bytes=0,
        disk_bytes=1 << 20,
        clock_ns=seconds(),
        wall_clock=lambda: 0,
    ) as store:
        assert store.recover() == []
        assert store.stats()["lease_files"] == 0
    assert folder.is_dir() == is_folder
