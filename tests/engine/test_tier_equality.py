"""Warm equals cold, token for token in float32, from every tier that a prefix can come from."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.compute.kv_cache import bytes_per_block
from engine.compute.loading import LoadedModel, load_model
from engine.compute.model_runner import ModelRunner
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.protocol import Breakpoint, EngineRecord, Finished, GenerateRequest, Sampling, Tokens
from engine.tiers.disk_tier import DiskTier
from engine.tiers.host_tier import HostTier
from engine.tiers.lease_files import Origin
from engine.tiers.lease_store import LeaseStore
from tests.engine.harness import Clock
from tests.engine.oracle import ListJournal
from tests.engine.slot_tier import ALWAYS_PAYS

BLOCK = 16


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> LoadedModel:
    return load_model(tiny_folder, dtype=torch.float32, device=torch.device("cpu"))


class Engine:
    """The real core, runner and tiers on the tiny model, stepped by hand."""

    def __init__(self, model: LoadedModel, tiers: list, **changes: object) -> None:
        values: dict[str, object] = {
            "num_blocks": 40,
            "max_model_len": 256,
            "vocab_size": 49152,
            "pin_cap_blocks": 16,
            "namespace_quota_blocks": 16,
            "max_num_batched_tokens": 48,
        }
        config = EngineConfig(**(values | changes))
        runner = ModelRunner(model.backend, config, entropy=bytes(32))
        self.tiers = tiers
        self.runner = runner
        block_bytes = bytes_per_block(model.backend.shape, model.backend.dtype, BLOCK)
        store = LeaseStore(
            tiers,
            costs=ALWAYS_PAYS,
            snapshot=runner.snapshot,
            block_size=BLOCK,
            block_bytes=block_bytes,
        )
        self.core = EngineCore(config, runner, boot_id="b", journal=ListJournal(), store=store)
        self.now_ms = 1_000

    def run(self, *requests: GenerateRequest) -> dict[str, tuple[list[int], EngineRecord]]:
        """Serve requests together; each one's output and record."""
        outputs: dict[str, list[int]] = {request.request_id: [] for request in requests}
        records: dict[str, EngineRecord] = {}
        for request in requests:
            assert self.core.submit(request, self.now_ms) is None
        while self.core.has_work:
            self.now_ms += 1
            for event in self.core.step(self.now_ms):
                if isinstance(event, Tokens):
                    outputs[event.request_id] += event.token_ids
                elif isinstance(event, Finished):
                    assert event.record is not None
                    records[event.request_id] = event.record
        for tier in self.tiers:
            if isinstance(tier, DiskTier):
                tier.settle()
        self.core.step(self.now_ms)
        self.core.check_integrity()
        return {name: (outputs[name], records[name]) for name in records}


@contextmanager
def disk(folder: Path) -> Iterator[DiskTier]:
    tier = DiskTier(
        folder,
        Origin("w", "float32", "layout"),
        budget_bytes=1 << 30,
        clock=lambda: 1_000,
        wall_clock=Clock(),
    )
    try:
        yield tier
    finally:
        tier.close()


def ask(name: str, length: int, lease: int, *, write: bool = False, seed: int = 1):
    """A prompt of `length` tokens that writes or reads a lease of its first `lease` tokens."""
    prompt = np.random.default_rng(seed).integers(3, 49_000, length).astype("<u4")
    return GenerateRequest(
        request_id=name,
        namespace=b"tenant",
        prompt_token_ids=prompt.tobytes(),
        max_tokens=12,
        read_tokens=0 if write else lease,
        sampling=Sampling(temperature=0.0),
        breakpoints=(Breakpoint(lease, 60_000, write=write, persist=True),),
    )


def other(name: str, seed: int) -> GenerateRequest:
    return ask(name, 180, 20, write=True, seed=seed)


LENGTHS = [(80, 64), (80, 61), (64, 64), (63, 17), (49, 48)]


@pytest.mark.parametrize(("length", "lease"), LENGTHS)
def test_a_prefix_from_disk_answers_like_one_that_was_computed(model, tmp_path, length, lease):
    cold, _ = Engine(model, [], enable_prefix_caching=False).run(ask("c", length, lease))["c"]
    with disk(tmp_path) as tier:
        engine = Engine(model, [tier])
        engine.run(ask("writer", length, lease, write=True))
        warm, from_device = engine.run(ask("warm", length, lease))["warm"]
        next(engine.core.leases.unpin_spare(), None)
        engine.run(*[other(f"o{n}", seed=n + 2) for n in range(4)])
        spilled, from_disk = engine.run(ask("spilled", length, lease))["spilled"]
    with disk(tmp_path) as tier:
        restarted, after = Engine(model, [tier]).run(ask("restarted", length, lease))["restarted"]

    num_read = min(lease, length - 1)
    assert from_device.reads_by_tier["device"] >= num_read
    assert from_disk.reads_by_tier["disk"] == after.reads_by_tier["disk"] == num_read
    assert cold == warm == spilled == restarted


def test_a_prefix_from_host_memory_answers_like_one_that_was_computed(model):
    cold, _ = Engine(model, [], enable_prefix_caching=False).run(ask("c", 80, 61))["c"]
    engine = Engine(model, [HostTier(budget_bytes=1 << 30)])
    engine.run(ask("writer", 80, 61, write=True))
    next(engine.core.leases.unpin_spare(), None)
    engine.run(*[other(f"o{n}", seed=n + 2) for n in range(4)])

    warm, record = engine.run(ask("warm", 80, 61))["warm"]

    assert record.reads_by_tier == {"host": 61}
    assert warm == cold


def test_a_copy_holds_nothing_of_what_follows_the_lease(model):
    engine = Engine(model, [HostTier(budget_bytes=1 << 30)])
    engine.run(ask("writer", 80, 20, write=True))
    ((payload, _),) = engine.tiers[0]._payloads.values()

    blocks = torch.from_numpy(payload).view(torch.float32).view(2, 4, 4, BLOCK, 8)

    assert blocks[0].count_nonzero()
    assert blocks[1, :, :, :4].count_nonzero()
    assert not blocks[1, :, :, 4:].count_nonzero()
