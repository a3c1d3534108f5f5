"""Paged attention and the paged model against recomputation from the first token."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.compute.attention_plan import SHARED_TOKENS_MIN
from engine.compute.backend import Backend
from engine.compute.kv_cache import KVCache
from engine.compute.loading import load_model
from engine.compute.torch_attention import Attended, attend, attend_plainly
from engine.plan import Row
from tests.engine.naive_llama import naive_logits
from tests.engine.rows import row
from tests.engine.tiny_model import write_tiny_model

CPU = torch.device("cpu")
NUM_BLOCKS = 64


def fresh_cache(model: Backend, *, num_blocks: int = NUM_BLOCKS) -> KVCache:
    """A cache full of NaN: whatever is read without having been written shows."""
    cache = KVCache(
        model.shape, num_blocks=num_blocks, block_size=16, dtype=model.dtype, device=CPU
    )
    rows = cache.head_block_rows(torch.arange(num_blocks).numpy()[None, :])
    for head_blocks in cache._head_blocks:
        head_blocks[rows] = torch.nan
    return cache


@pytest.fixture(scope="module")
def tiny(tiny_folder: Path) -> Backend:
    return load_model(tiny_folder, dtype=torch.float32, device=CPU).backend


@pytest.fixture(scope="module")
def prompts(tiny_folder: Path) -> list[tuple[list[int], torch.Tensor]]:
    """Four sequences, and the naive logits at each of their positions."""
    chance = torch.Generator().manual_seed(7)
    made = []
    for length in (5, 33, 64, 90):
        tokens = torch.randint(17, 49152, (length,), generator=chance).tolist()
        made.append((tokens, naive_logits(tiny_folder, tokens)))
    return made


@pytest.mark.parametrize("seed", range(30))
def test_any_chunking_and_any_block_table_gives_the_naive_logits(
    seed: int, tiny: Backend, prompts: list[tuple[list[int], torch.Tensor]]
) -> None:
    chance = random.Random(seed)
    table = chance.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    cache = fresh_cache(tiny)
    done = [0] * len(prompts)

    # Each step takes some sequences, each with a chunk of its own length, until all are computed.
    while any(at < len(tokens) for at, (tokens, _) in zip(done, prompts, strict=True)):
        rows: list[Row] = []
        expected = []
        for i, (tokens, logits) in enumerate(prompts):
            chunk = min(chance.choice([0, 1, 1, 2, 15, 16, 17, 40]), len(tokens) - done[i])
            if chunk == 0:
                continue
            piece = tokens[done[i] : done[i] + chunk]
            rows.append(row(piece, start=done[i], blocks=table[i * 8 : i * 8 + 8]))
            done[i] += chunk
            expected.append(logits[done[i] - 1])
        if rows:
            found = tiny.compute(cache, rows)
            torch.testing.assert_close(found, torch.stack(expected), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": False},
        {"attention_bias": True, "mlp_bias": True},
        {"num_key_value_heads": 6},
        {"num_key_value_heads": 1, "head_dim": 16},
    ],
    ids=["untied", "biased", "plain heads", "one kv head"],
)
def test_every_variant_of_the_architecture_gives_the_naive_logits(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    folder = write_tiny_model(tmp_path / "model", **changes)
    model = load_model(folder, dtype=torch.float32, device=CPU).backend
    tokens = list(range(100, 137))
    cache = fresh_cache(model)

    model.compute(cache, [row(tokens[:20], blocks=[4, 2, 9])])
    prefill = model.compute(cache, [row(tokens[20:36], start=20, blocks=[4, 2, 9])])
    decode = model.compute(cache, [row(tokens[36:], start=36, blocks=[4, 2, 9])])

    expected = naive_logits(folder, tokens)
    torch.testing.assert_close(prefill[0], expected[35], atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(decode[0], expected[36], atol=2e-4, rtol=1e-4)


def test_only_rows_that_sample_get_logits_in_order(
    tiny: Backend, prompts: list[tuple[list[int], torch.Tensor]]
) -> None:
    (a, _), (b, b_logits), (c, c_logits), _ = prompts
    rows = [
        row(a, blocks=[0], samples=False),
        row(b, blocks=[1, 2, 3]),
        row(c, blocks=[4, 5, 6, 7]),
    ]

    found = tiny.compute(fresh_cache(tiny), rows)

    torch.testing.assert_close(
        found, torch.stack([b_logits[-1], c_logits[-1]]), atol=2e-4, rtol=1e-4
    )


@pytest.mark.parametrize("readers", [2, 4])
def test_sequences_that_share_a_long_prefix_compute_what_each_does_alone(
    readers: int, tiny: Backend
) -> None:
    chance = torch.Generator().manual_seed(5)
    prefix_blocks = 1 + SHARED_TOKENS_MIN // (readers - 1) // 16
    prefix = torch.randint(17, 49152, (prefix_blocks * 16,), generator=chance).tolist()
    blocks = random.Random(5).sample(range(80), 80)
    cache = fresh_cache(tiny, num_blocks=80)
    tiny.compute(cache, [row(prefix, blocks=blocks)])
    # Each goes on in a private block, some by one token; the second has three tokens behind it.
    tables = [[*blocks[:prefix_blocks], blocks[70 + i]] for i in range(4)]
    tiny.compute(cache, [row([40, 41, 42], start=len(prefix), blocks=tables[1])])
    rows = [
        row([50], start=len(prefix), blocks=tables[0]),
        row([50, 51], start=len(prefix) + 3, blocks=tables[1]),
        row([60, 61, 62, 63, 64], start=len(prefix), blocks=tables[2]),
        row([70], start=len(prefix), blocks=tables[3]),
    ][:readers]
    rows.insert(1, row(prefix[:4], blocks=[blocks[75]]))  # a stranger between them

    together = tiny.compute(cache, rows)

    alone = torch.cat([tiny.compute(cache, [each]) for each in rows])
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=1e-4)


def test_prefixes_of_unequal_length_are_shared_as_far_as_they_go(tiny: Backend) -> None:
    chance = torch.Generator().manual_seed(6)
    prefix = torch.randint(17, 49152, (33 * 16,), generator=chance).tolist()
    blocks = random.Random(6).sample(range(80), 80)
    cache = fresh_cache(tiny, num_blocks=80)
    tiny.compute(cache, [row(prefix, blocks=blocks)])
    rows = []
    for i, num_shared in enumerate([33, 12, 20, 33, 9, 7]):
        table = [*blocks[:num_shared], blocks[60 + 2 * i], blocks[61 + 2 * i]]
        own = list(range(40, 54 + i))
        tiny.compute(cache, [row(own, start=num_shared * 16, blocks=table)])
        rows.append(row([50 + i], start=num_shared * 16 + len(own), blocks=table))

    together = tiny.compute(cache, rows)

    alone = torch.cat([tiny.compute(cache, [each]) for each in rows])
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("masked", "is_causal"), [(False, False), (True, False), (False, True)])
def test_attention_is_the_same_on_every_device(masked: bool, is_causal: bool) -> None:
    chance = torch.Generator().manual_seed(3)
    q, k, v = torch.randn(3, 2, 3, 40, 16, generator=chance)
    mask = torch.zeros(40, 40).index_fill_(1, torch.tensor([0, 39]), -torch.inf) if masked else None

    expected = attend_plainly(q, k, v, mask=mask, is_causal=is_causal)

    torch.testing.assert_close(attend(q, k, v, mask=mask, is_causal=is_causal), expected)


def test_bfloat16_stays_near_float32(
    tiny_folder: Path, prompts: list[tuple[list[int], torch.Tensor]]
) -> None:
    model = load_model(tiny_folder, dtype=torch.bfloat16, device=CPU).backend
    tokens, expected = prompts[2]
    cache = fresh_cache(model)

    model.compute(cache, [row(tokens[:63], blocks=[3, 1, 2, 0])])
    found = model.compute(cache, [row(tokens[63:], start=63, blocks=[3, 1, 2, 0])])[0]

    cosine = torch.nn.functional.cosine_similarity(found, expected[-1], dim=0)
    assert cosine > 0.999


def test_many_lengths_meet_torch_as_few_shapes(
    tiny: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch keeps compiled kernels for each pair of shapes: memory that never stops growing."""
    seen: set[tuple[torch.Size, torch.Size]] = set()

    def note(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Attended:
        seen.add((q.shape, k.shape))
        return attend(q, k, v, **options)

    monkeypatch.setattr("engine.compute.torch_attention.attend", note)
    cache, blocks = fresh_cache(tiny), range(NUM_BLOCKS)
    for start in range(16, 64):
        for length in (2, 7, 16, 30, 31):
            tiny.compute(cache, [row([20] * length, start=start, blocks=blocks)])

    # 240 pairs of lengths: chunks of 16 or 32 among themselves, and behind 16, 32, 48 or 64.
    assert len(seen) <= 2 + 2 * 4
