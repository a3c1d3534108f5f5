"""Paged attention and the paged model against recomputation from the first token."""

import random
from pathlib import Path

import pytest
import torch

from engine.kv_cache import KVCache
from engine.loading import load_model
from engine.model_runner import compute_logits
from engine.models.llama import Llama
from engine.plan import Row
from tests.engine.naive_llama import naive_logits
from tests.engine.rows import row
from tests.engine.tiny_model import write_tiny_model

CPU = torch.device("cpu")
NUM_BLOCKS = 64


def fresh_cache(model: Llama) -> KVCache:
    """A cache full of NaN: whatever is read without having been written shows."""
    cache = KVCache(
        model.config, num_blocks=NUM_BLOCKS, block_size=16, dtype=model.dtype, device=CPU
    )
    rows = cache.tile_rows(torch.arange(NUM_BLOCKS).numpy()[None, :])
    for tiles in cache._tiles:
        tiles[rows] = torch.nan
    return cache


@pytest.fixture(scope="module")
def tiny(tiny_folder: Path) -> Llama:
    return load_model(tiny_folder, dtype=torch.float32, device=CPU).model


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
    seed: int, tiny: Llama, prompts: list[tuple[list[int], torch.Tensor]]
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
            found = compute_logits(tiny, cache, rows)
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
    model = load_model(folder, dtype=torch.float32, device=CPU).model
    tokens = list(range(100, 137))
    cache = fresh_cache(model)

    compute_logits(model, cache, [row(tokens[:20], blocks=[4, 2, 9])])
    prefill = compute_logits(model, cache, [row(tokens[20:36], start=20, blocks=[4, 2, 9])])
    decode = compute_logits(model, cache, [row(tokens[36:], start=36, blocks=[4, 2, 9])])

    expected = naive_logits(folder, tokens)
    torch.testing.assert_close(prefill[0], expected[35], atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(decode[0], expected[36], atol=2e-4, rtol=1e-4)


def test_only_rows_that_sample_get_logits_in_order(
    tiny: Llama, prompts: list[tuple[list[int], torch.Tensor]]
) -> None:
    (a, _), (b, b_logits), (c, c_logits), _ = prompts
    rows = [
        row(a, blocks=[0], samples=False),
        row(b, blocks=[1, 2, 3]),
        row(c, blocks=[4, 5, 6, 7]),
    ]

    found = compute_logits(tiny, fresh_cache(tiny), rows)

    torch.testing.assert_close(
        found, torch.stack([b_logits[-1], c_logits[-1]]), atol=2e-4, rtol=1e-4
    )


def test_bfloat16_stays_near_float32(
    tiny_folder: Path, prompts: list[tuple[list[int], torch.Tensor]]
) -> None:
    model = load_model(tiny_folder, dtype=torch.bfloat16, device=CPU).model
    tokens, expected = prompts[2]
    cache = fresh_cache(model)

    compute_logits(model, cache, [row(tokens[:63], blocks=[3, 1, 2, 0])])
    found = compute_logits(model, cache, [row(tokens[63:], start=63, blocks=[3, 1, 2, 0])])[0]

    cosine = torch.nn.functional.cosine_similarity(found, expected[-1], dim=0)
    assert cosine > 0.999
