"""The runner executes plans: copies first, then every row, sampling those that ask."""

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.compute.backend import Backend
from engine.compute.loading import load_model
from engine.compute.model_runner import ModelRunner
from engine.config import EngineConfig
from engine.errors import DeviceLost
from engine.plan import BlockCopy, BlockLoad, Plan, Row
from engine.protocol import Sampling
from tests.engine.naive_llama import naive_logits
from tests.engine.rows import GREEDY, row

CONFIG = EngineConfig(
    num_blocks=32,
    max_model_len=512,
    vocab_size=49152,
    pin_cap_blocks=0,
    namespace_quota_blocks=0,
)
PROMPT = list(range(200, 239))


@pytest.fixture(scope="module")
def tiny(tiny_folder: Path) -> Backend:
    return load_model(tiny_folder, dtype=torch.float32, device=torch.device("cpu")).backend


@pytest.fixture
def runner(tiny: Backend) -> ModelRunner:
    return ModelRunner(tiny, CONFIG, entropy=b"entropy")


def plan(*rows: Row, copies: tuple[BlockCopy, ...] = ()) -> Plan:
    return Plan(copies=copies, rows=rows)


def generate(runner: ModelRunner, count: int, sampling: Sampling = GREEDY) -> list[int]:
    """`count` tokens after PROMPT, one step each."""
    blocks = [9, 3, 17, 4]
    tokens = runner.execute(plan(row(PROMPT, blocks=blocks, sampling=sampling)))
    while len(tokens) < count:
        start = len(PROMPT) + len(tokens) - 1
        step = row(
            tokens[-1:],
            start=start,
            blocks=blocks,
            sampling=sampling,
            output_index=len(tokens),
        )
        tokens += runner.execute(plan(step))
    return tokens


def test_greedy_generation_equals_the_naive_one(runner: ModelRunner, tiny_folder: Path) -> None:
    found = generate(runner, 12)

    expected = naive_logits(tiny_folder, PROMPT + found).argmax(-1)[len(PROMPT) - 1 : -1]
    assert found == expected.tolist()


def test_tokens_come_in_the_order_of_the_rows_that_sample(
    runner: ModelRunner, tiny_folder: Path
) -> None:
    rows = [
        row(PROMPT[:20], blocks=[0, 1]),
        row(PROMPT[:30], blocks=[2, 3], samples=False),
        row(PROMPT[:1], blocks=[4]),
        row(PROMPT[:5], blocks=[5]),
    ]

    found = runner.execute(plan(*rows))

    expected = naive_logits(tiny_folder, PROMPT).argmax(-1)
    assert found == [int(expected[19]), int(expected[0]), int(expected[4])]


def test_copies_run_before_the_rows_that_read_them(runner: ModelRunner) -> None:
    [expected] = runner.execute(plan(row(PROMPT, blocks=[0, 1, 2])))

    # A second sequence shares block 0, and 10 slots of block 1 by copy.
    [found] = runner.execute(
        plan(row(PROMPT[26:], start=26, blocks=[0, 7, 8]), copies=(BlockCopy(1, 7, 10),))
    )

    assert found == expected


def test_a_plan_of_copies_alone_or_of_nothing_samples_nothing(runner: ModelRunner) -> None:
    assert runner.execute(plan(copies=(BlockCopy(0, 1, 16),))) == []
    assert runner.execute(plan()) == []


def test_a_plan_without_sampling_rows_still_writes_its_kv(runner: ModelRunner) -> None:
    [expected] = runner.execute(plan(row(PROMPT, blocks=[0, 1, 2])))

    assert runner.execute(plan(row(PROMPT[:38], blocks=[4, 5, 6], samples=False))) == []
    assert runner.execute(plan(row(PROMPT[38:], start=38, blocks=[4, 5, 6]))) == [expected]


def test_a_preempted_seeded_request_continues_unchanged(runner: ModelRunner) -> None:
    sampling = Sampling(temperature=1.0, seed=8)
    whole = generate(runner, 8, sampling)

    # Recomputed from the first token after five outputs, elsewhere in the pool.
    again = row(PROMPT + whole[:5], blocks=[20, 21, 22], sampling=sampling, output_index=5)

    assert runner.execute(plan(again)) == [whole[5]]


def test_what_a_failed_request_left_in_the_pool_spoils_no_other(runner: ModelRunner) -> None:
    expected = generate(runner, 20)
    blocks = np.arange(CONFIG.num_blocks)
    payload = np.full_like(runner.snapshot(blocks.tolist(), CONFIG.num_blocks * 16), 0xFF)  # NaN

    runner.execute(Plan((), (), (BlockLoad(tuple(blocks.tolist()), payload, skip=0),)))

    assert generate(runner, 20) == expected


def test_an_error_of_the_device_is_one_after_which_the_engine_must_end(
    tiny: Backend,
) -> None:
    class Broken:
        shape, dtype, device = tiny.shape, tiny.dtype, tiny.device

        def compute(self, cache: object, rows: object) -> torch.Tensor:
            raise RuntimeError("CUDA error: an illegal memory access\nCompile with ...")

    broken = ModelRunner(Broken(), CONFIG, entropy=b"entropy")

    with pytest.raises(DeviceLost, match=r"started again: CUDA error: an illegal memory access$"):
        broken.execute(plan(row(PROMPT, blocks=[0, 1, 2])))
