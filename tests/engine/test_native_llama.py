"""A step in C against the same step in torch: every shape of batch, context and model."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file, save_file

from engine.compute.native.library import Library
from engine.compute.native.native_llama import require_supported
from engine.errors import KernelsUnavailable
from engine.models.registry import find_architecture
from engine.plan import Row
from tests.engine.native_models import CPU, Trio, trio
from tests.engine.rows import row
from tests.engine.tiny_model import write_tiny_model

# Sizes that are no multiples of a tile: all of them are padded.
SHAPE = {"head_dim": 32, "hidden_size": 72, "intermediate_size": 104, "vocab_size": 1_000}
# Contexts around the ends of blocks, tiles, pieces and parts.
CONTEXTS = (1, 2, 15, 16, 17, 31, 32, 33, 127, 128, 129, 255, 256, 257, 300, 511, 512, 513)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("native") / "tiny", **SHAPE)


@pytest.fixture(params=["native", "without tiles", "portable"])
def library(request: pytest.FixtureRequest, kernels: dict[str, Library]) -> Library:
    found: Library = kernels[request.param]
    return found


@pytest.fixture
def threads() -> Iterator[None]:
    """Whatever number of threads a test sets, the next one has one again."""
    yield
    torch.set_num_threads(1)


def sequence(length: int, seed: int = 0) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(17, 1_000) for _ in range(length)]


@pytest.mark.parametrize("seed", range(6))
def test_any_chunking_and_any_block_table_stays_near_float32(
    seed: int, folder: Path, library: Library
) -> None:
    models = trio(folder, library)
    chance = random.Random(seed)
    table = chance.sample(range(96), 96)
    prompts = [sequence(length, seed) for length in (5, 33, 64, 90, 150)]
    done = [0] * len(prompts)

    while any(at < len(tokens) for at, tokens in zip(done, prompts, strict=True)):
        rows: list[Row] = []
        for i, tokens in enumerate(prompts):
            chunk = min(chance.choice([0, 1, 1, 2, 15, 16, 17, 40]), len(tokens) - done[i])
            if chunk > 0:
                piece = tokens[done[i] : done[i] + chunk]
                rows.append(row(piece, start=done[i], blocks=table[i * 10 : i * 10 + 10]))
                done[i] += chunk
        if rows:
            models.compare(rows)


@pytest.mark.parametrize("context", CONTEXTS)
def test_prompt_and_decode_agree_at_every_length_of_context(
    context: int, folder: Path, library: Library
) -> None:
    models = trio(folder, library)
    blocks = random.Random(context).sample(range(96), 40)

    models.compare([row(sequence(context), blocks=blocks)])
    models.compare([row([33], start=context, blocks=blocks)])
    models.compare([row([34, 35, 36], start=context + 1, blocks=blocks)])


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.usefixtures("threads")
def test_every_number_of_rows_decodes_on_every_number_of_threads(
    num_threads: int, folder: Path, library: Library
) -> None:
    torch.set_num_threads(num_threads)
    models = trio(folder, library, num_blocks=256)
    blocks = random.Random(0).sample(range(256), 256)
    tables = [blocks[i * 4 : i * 4 + 4] for i in range(64)]
    models.compare([row(sequence(i % 40 + 1, i), blocks=tables[i]) for i in range(64)])

    for num_rows in (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64):
        rows = [row([40 + i], start=i % 40 + 1, blocks=tables[i]) for i in range(num_rows)]
        models.compare(rows)


@pytest.mark.parametrize("readers", [2, 3, 6, 9])
def test_sequences_that_share_a_prefix_compute_what_each_does_alone(
    readers: int, folder: Path, library: Library
) -> None:
    models = trio(folder, library)
    blocks = random.Random(5).sample(range(96), 96)
    prefix, num_shared = sequence(33 * 16), 33
    models.compare([row(prefix, blocks=blocks)])
    tables = [[*blocks[:num_shared], blocks[80 + i]] for i in range(readers)]
    rows = [row([50 + i], start=len(prefix), blocks=table) for i, table in enumerate(tables)]
    rows.insert(1, row(sequence(20), blocks=[blocks[60], blocks[61]]))  # strangers between them
    rows.insert(2, row([9], blocks=[blocks[62]]))

    together = models.compare(rows)

    alone = torch.cat([models.native.logits([each]) for each in rows])
    assert (together - alone).square().mean().sqrt() < 0.02 * alone.square().mean().sqrt()


def test_prefixes_of_unequal_length_are_shared_as_far_as_they_go(
    folder: Path, library: Library
) -> None:
    models = trio(folder, library)
    blocks = random.Random(5).sample(range(96), 96)
    models.compare([row(sequence(33 * 16), blocks=blocks)])
    rows = []
    for i, num_shared in enumerate([33, 12, 20, 33, 9, 7]):
        table = [*blocks[:num_shared], blocks[80 + 2 * i], blocks[81 + 2 * i]]
        models.compare([row(sequence(14 + i), start=num_shared * 16, blocks=table)])
        rows.append(row([50 + i], start=num_shared * 16 + 14 + i, blocks=table))

    together = models.compare(rows)

    alone = torch.cat([models.native.logits([each]) for each in rows])
    assert (together - alone).square().mean().sqrt() < 0.02 * alone.square().mean().sqrt()


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": False},
        {"attention_bias": True, "mlp_bias": True},
        {"num_key_value_heads": 6},
        {"num_key_value_heads": 1},
        {"head_dim": 64, "hidden_size": 96},
        {"head_dim": 96, "num_attention_heads": 4},
        {"head_dim": 256, "num_attention_heads": 2},
        {"num_attention_heads": 16, "num_key_value_heads": 1},
    ],
    ids=["untied", "biased", "plain heads", "one kv head", "64", "96", "256", "16 to a head"],
)
def test_every_variant_of_the_architecture_stays_near_float32(
    tmp_path: Path, changes: dict[str, object], library: Library
) -> None:
    folder = write_tiny_model(tmp_path / "model", **(SHAPE | changes))
    models = trio(folder, library)
    tokens = sequence(60)

    models.compare([row(tokens[:30], blocks=[4, 2, 9, 7])])
    models.compare([row(tokens[30:59], start=30, blocks=[4, 2, 9, 7])])
    models.compare([row(tokens[59:], start=59, blocks=[4, 2, 9, 7])])


@pytest.mark.parametrize("factor", [2.0**10, 2.0**33, 2.0**100])
def test_probabilities_add_up_to_one_however_large_the_scores(
    tmp_path: Path, factor: float, library: Library
) -> None:
    folder = write_tiny_model(tmp_path / "model", **(SHAPE | {"attention_bias": True}))
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in tensors:
        if "q_proj" in name:
            tensors[name] *= factor
        if "v_proj.weight" in name:  # all values are the bias, whichever key wins
            tensors[name] *= 0
    save_file(tensors, path, metadata={"format": "pt"})
    models = trio(folder, library)
    tokens = sequence(301)

    models.compare([row(tokens[:300], blocks=range(20))])
    models.compare([row(tokens[300:], start=300, blocks=range(20))])


@pytest.fixture
def models(folder: Path, library: Library) -> Trio:
    return trio(folder, library)


def test_a_block_that_gets_its_first_token_is_clear_behind_it(models: Trio) -> None:
    models.native.logits([row(sequence(16), blocks=[3])])
    models.native.logits([row([40], start=16, blocks=[3, 8])])
    models.native.logits([row(sequence(21), blocks=[5, 6])])

    written = models.native.cache._blocks
    assert written[[3, 5, 6, 8]].isfinite().all()
    assert written[8, :, :, 0].any(dim=-1).all()
    assert not written[8, :, :, 1:].any()
    assert not written[6, :, :, 5:].any()
    assert written[[0, 1, 2, 4, 7]].isnan().all()


def test_a_step_in_the_middle_of_a_block_leaves_what_is_in_it(models: Trio) -> None:
    models.native.logits([row(sequence(5), blocks=[3])])
    before = models.native.cache._blocks[3].clone()

    models.native.logits([row([40], start=5, blocks=[3])])

    assert models.native.cache._blocks[3, :, :, :5].equal(before[:, :, :5])


def test_only_rows_that_sample_get_logits_in_order(models: Trio) -> None:
    rows = [
        row(sequence(20), blocks=[0, 1]),
        row(sequence(30), blocks=[2, 3], samples=False),
        row([77], blocks=[4]),
    ]

    found = models.compare(rows)

    assert found.shape == (2, 1_000)
    assert models.native.logits([row([77], blocks=[5], samples=False)]).shape == (0, 1_000)


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (row([20] * 5, blocks=[96]), "a block table names no block"),
        (row([20] * 5, blocks=[-1]), "a block table names no block"),
        (row([1_000], blocks=[0]), "a token is not in the vocabulary"),
        (row([20], start=-1, blocks=[0]), "no such position"),
        (row([20], start=4_096, blocks=range(300)), "a block table names no block"),
        (row([20], start=4_096, blocks=[0] * 300), "no such position"),
    ],
)
def test_a_plan_that_reaches_outside_is_refused(models: Trio, bad: Row, complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        models.native.logits([bad])


@pytest.mark.parametrize(
    ("changes", "options", "reason"),
    [
        ({"head_dim": 8}, {}, "the model's heads have 8 dimensions"),
        ({"head_dim": 288}, {}, "the model's heads have 288 dimensions"),
        ({"num_attention_heads": 34}, {}, "34 heads share 2 KV heads"),
        ({}, {"dtype": torch.float32}, "the number format is float32"),
        ({}, {"device": torch.device("cuda")}, "the device is cuda"),
        ({}, {"block_size": 8}, "a block has 8 tokens"),
    ],
)
def test_what_the_kernels_do_not_take_is_declined_with_its_reason(
    tmp_path: Path, changes: dict[str, object], options: dict[str, object], reason: str
) -> None:
    _, config = find_architecture(write_tiny_model(tmp_path, **(SHAPE | changes)))
    asked = {"dtype": torch.bfloat16, "device": CPU, "block_size": 16} | options

    with pytest.raises(KernelsUnavailable) as caught:
        require_supported(config, **asked)

    assert caught.value.reason == reason
