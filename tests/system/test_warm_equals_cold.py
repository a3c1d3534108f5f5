"""Cached answers are right: greedy fp32 output over reused KV equals output with the cache off.

Each case is a random prompt with up to four breakpoints at random token positions. A first request
writes them, then goes its own way; a second one reads one of them and continues with the prompt
itself. Its answer must be, token for token, what an engine without any cache says.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.compute.backend import Backend
from engine.compute.loading import load_model
from engine.compute.model_runner import ModelRunner
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.protocol import (
    Breakpoint,
    EngineRecord,
    Finished,
    GenerateRequest,
    Rejected,
    Sampling,
    Tokens,
)

OUTPUT_TOKENS = 8
TTL_MS = 300_000
BATCH = 20  # cases that run at once, in one ragged batch a step


@dataclass(frozen=True)
class Case:
    """A prompt, where its breakpoints are, and which of them the second request reads."""

    prompt: tuple[int, ...]
    breakpoints: tuple[int, ...]
    read: int
    detour: tuple[int, ...]


class Journal:
    """Keeps nothing: these requests are not billed."""

    def __getattr__(self, _name: str) -> Any:
        return lambda *_: None


class Engine:
    """A core and its runner, driven until everybody has answered."""

    def __init__(self, model: Backend, *, caching: bool, num_blocks: int) -> None:
        self.config = EngineConfig(
            num_blocks=num_blocks,
            max_model_len=model.shape.max_model_len,
            vocab_size=model.shape.vocab_size,
            max_num_batched_tokens=256,  # small, so that prompts are cut into chunks
            pin_cap_blocks=num_blocks // 2,
            namespace_quota_blocks=num_blocks // 2,
            enable_prefix_caching=caching,
        )
        runner = ModelRunner(model, self.config, entropy=b"")
        self.core = EngineCore(self.config, runner, boot_id="eng_test", journal=Journal())
        self.now_ms = 0

    def answer(
        self, requests: Sequence[GenerateRequest]
    ) -> tuple[list[tuple[int, ...]], list[EngineRecord]]:
        """The output and the record of each request, all run together."""
        outputs: dict[str, list[int]] = {request.request_id: [] for request in requests}
        records: dict[str, EngineRecord] = {}
        for request in requests:
            rejected = self.core.submit(request, self.now_ms)
            assert not isinstance(rejected, Rejected), rejected
        while self.core.has_work:
            for event in self.core.step(self.now_ms):
                if isinstance(event, Tokens):
                    outputs[event.request_id] += event.token_ids
                elif isinstance(event, Finished):
                    assert event.record is not None
                    records[event.request_id] = event.record
        return (
            [tuple(outputs[request.request_id]) for request in requests],
            [records[request.request_id] for request in requests],
        )

    def forget(self) -> None:
        """Let every lease run out."""
        self.now_ms += TTL_MS + self.config.lease_grace_ms + 1
        self.core.step(self.now_ms)


def make_case(chance: random.Random, *, vocab_size: int, longest: int) -> Case:
    length = chance.randint(8, longest)
    prompt = tuple(chance.randrange(20, vocab_size) for _ in range(length))
    places = chance.sample(range(1, length + 1), k=chance.randint(1, min(4, length)))
    breakpoints = tuple(sorted(places))
    detour = tuple(chance.randrange(20, vocab_size) for _ in range(chance.randint(1, 30)))
    return Case(prompt, breakpoints, chance.choice(breakpoints), detour)


def ask(case: Case, number: int, part: str, tokens: tuple[int, ...]) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"{part}{number}",
        namespace=b"tenant %d" % number,
        prompt_token_ids=np.array(tokens, dtype="<u4").tobytes(),
        max_tokens=OUTPUT_TOKENS,
        sampling=Sampling(temperature=0.0),
    )


def check(cases: Sequence[Case], *, cold: Engine, warm: Engine) -> None:
    """The three runs of a batch of cases; the cold engine never reuses anything."""
    writes, reads, plain = [], [], []
    for number, case in enumerate(cases):
        write = ask(case, number, "write", case.prompt[: case.breakpoints[-1]] + case.detour)
        marks = tuple(Breakpoint(at, TTL_MS, write=True) for at in case.breakpoints)
        writes.append(replace(write, breakpoints=marks))
        read = ask(case, number, "read", case.prompt)
        mark = (Breakpoint(case.read, TTL_MS, write=False),)
        reads.append(replace(read, read_tokens=case.read, breakpoints=mark))
        plain.append(ask(case, number, "plain", case.prompt))

    expected, _ = cold.answer(plain)
    _, written = warm.answer(writes)
    found, records = warm.answer(reads)
    warm.forget()

    for number, case in enumerate(cases):
        assert all(grant.committed for grant in written[number].grants)
        record = records[number]
        assert record.tokens_reused_promised == min(case.read, len(case.prompt) - 1)
        assert record.tokens_read_recomputed == case.read - record.tokens_reused_promised
        assert found[number] == expected[number], (case, record)


def run_cases(folder: Path, *, num_cases: int, longest: int, seed: int) -> None:
    torch.set_num_threads(1)
    model = load_model(folder, dtype=torch.float32, device=torch.device("cpu")).backend
    # Two runs of every case must fit beside each other, pinned.
    num_blocks = BATCH * 4 * (longest + 64) // 16 + model.shape.max_model_len // 16
    cold = Engine(model, caching=False, num_blocks=num_blocks)
    warm = Engine(model, caching=True, num_blocks=num_blocks)
    chance = random.Random(seed)
    cases = [
        make_case(chance, vocab_size=model.shape.vocab_size, longest=longest)
        for _ in range(num_cases)
    ]
    for start in range(0, num_cases, BATCH):
        check(cases[start : start + BATCH], cold=cold, warm=warm)


def test_the_tiny_model_answers_the_same_over_reused_kv(tiny_model: Path) -> None:
    run_cases(tiny_model, num_cases=300, longest=300, seed=1)


@pytest.mark.parametrize("seed", [2])
def test_smollm2_answers_the_same_over_reused_kv(smollm2: Path, seed: int, soak: bool) -> None:
    run_cases(smollm2, num_cases=50 if soak else 5, longest=400, seed=seed)
