"""The soak sees what an engine keeps, and holds on a tiny model; the true one takes 30 minutes."""

import random
from pathlib import Path

import pytest

from bench.engines import Engine
from bench.errors import BenchError
from bench.idle import NOTHING, Sample, check_idle, take_sample
from bench.mix import NAMESPACES, Mix
from bench.soak import (
    CONTEXT_TOKENS,
    QUEUE_WAIT_SECONDS,
    check_files,
    flags,
    soak,
    unpin_everything,
    with_short_context,
)
from bench.traffic import Traffic
from engine.client import GenerateRequest, Sampling

IDLE = dict.fromkeys(NOTHING, 0.0) | {
    "kv_blocks_free": 10.0, "kv_blocks_evictable": 20.0, "kv_blocks_pinned": 30.0,
    "kv_blocks_total": 60.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kv_blocks_free": 9.0}, "blocks leak"),
        ({"kv_blocks_total": 61.0}, "blocks leak"),
        ({"num_requests_waiting": 1.0}, "num_requests_waiting"),
        ({"kv_blocks_reserved": 2.0}, "kv_blocks_reserved"),
        ({"steps_failed_total": 1.0}, "steps_failed_total"),
        ({"kv_blocks_pinned": 31.0, "kv_blocks_free": 9.0}, "31 blocks pinned of 30"),
    ],
    ids=str,
)
def test_an_idle_engine_that_keeps_something_is_seen(change: dict[str, float], says: str) -> None:
    check_idle(IDLE, pin_cap=30)

    with pytest.raises(BenchError, match=says):
        check_idle(IDLE | change, pin_cap=30)


def test_the_mix_comes_from_its_seed_and_has_what_a_soak_is_about() -> None:
    def draw() -> list[GenerateRequest]:
        mix = Mix(random.Random(7), context_tokens=CONTEXT_TOKENS)
        return [mix.next() for _ in range(400)]

    requests = draw()

    assert requests == draw()
    assert len({request.request_id for request in requests}) == 400
    assert {request.namespace for request in requests} == set(NAMESPACES)
    marks = [mark for request in requests for mark in request.breakpoints]
    assert {mark.persist for mark in marks} == {mark.write for mark in marks} == {True, False}
    assert any(mark.num_tokens % 16 for mark in marks)
    assert any(len(request.breakpoints) > 2 for request in requests)
    assert any(request.num_prompt_tokens > CONTEXT_TOKENS for request in requests)


async def test_a_tiny_engine_holds_for_a_moment(tiny_folder: Path, tmp_path: Path) -> None:
    chance = random.Random(3)
    model = with_short_context(tiny_folder, tmp_path / "tiny")
    block_bytes = 16 * 4 * 2 * 2 * 8 * 4  # tokens, layers, keys and values, heads, numbers, float32

    # A slow prefill, so that aborts meet it.
    slow = ("--dtype", "float32", "--max-num-batched-tokens", "16")
    async with Engine(model, *flags(block_bytes), *slow) as engine:
        mix = Mix(chance, context_tokens=CONTEXT_TOKENS)
        traffic = Traffic(
            engine, mix, chance, queue_wait_seconds=QUEUE_WAIT_SECONDS, patience_seconds=0.8
        )
        samples = await soak(engine, traffic, chance, minutes=0.08)
        stats = await unpin_everything(engine, traffic)
        await traffic.close()

    check_files(samples)
    tally = traffic.tally
    assert {"granted", "refreshed"} <= tally.grants.keys()
    assert {"capacity", "quota"} & tally.grants.keys()
    assert tally.aborts
    assert tally.outcomes["max_tokens"]
    assert stats["kv_blocks_pinned"] == 0


async def test_an_engine_with_a_request_left_is_not_idle(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.idle.IDLE_SECONDS", 0.2)
    endless = GenerateRequest(
        "endless", b"tenant", bytes(40), 4_000, sampling=Sampling(temperature=0), ignore_eos=True
    )

    async with Engine(tiny_folder, "--dtype", "float32") as engine:
        stream = engine.client.generate(endless)
        await anext(aiter(stream))
        with pytest.raises(BenchError, match="not idle"):
            await take_sample(engine, 0.0)
        stream.abort()
        async for _ in stream:
            pass
        await take_sample(engine, 0.0)


def test_files_that_pile_up_are_seen() -> None:
    def sample(num_files_open: int) -> Sample:
        return Sample(0, 0, 0, num_files_open, 0, 0, 0, 0)

    check_files([sample(13), sample(15), sample(13)])
    with pytest.raises(BenchError, match="16 files open at idle, 13 at first"):
        check_files([sample(13), sample(16)])
