"""Loading a model folder: what it says, and every way in which it can be wrong."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from engine.compute.loading import LoadedModel, load_model
from engine.errors import ModelFileError, UnsupportedModel
from engine.model_files.model_folder import write_manifest
from engine.models.llama_config import LlamaConfig, RopeScaling
from engine.models.registry import find_architecture
from engine.protocol import Sampling
from tests.engine.tiny_model import write_tiny_model

SMALL = {"vocab_size": 64, "num_hidden_layers": 2}


def load(folder: Path) -> LoadedModel:
    return load_model(folder, dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model", **SMALL)


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder: Path, edit: Callable[[dict[str, np.ndarray]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def shard(folder: Path) -> None:
    """Split the weights into two files with an index, as larger models are kept."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    where = {name: file for file, part in parts.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def logits(loaded: LoadedModel) -> torch.Tensor:
    """Some output of the model: one token that attends to itself."""
    model = loaded.backend.model

    def attend_to_self(q: torch.Tensor, kv: torch.Tensor, layer: int) -> torch.Tensor:
        values = kv[:, kv.shape[1] // 2 :]
        return values.repeat_interleave(q.shape[1] // values.shape[1], 1).flatten(1)

    zero = torch.zeros(1, dtype=torch.int64)
    return model.compute(torch.tensor([7]), zero, attend_to_self, zero)


def test_shards_load_as_one_file_does(folder: Path) -> None:
    whole = load(folder)
    shard(folder)

    sharded = load(folder)

    assert torch.equal(logits(sharded), logits(whole))


def test_a_stored_copy_of_tied_weights_and_computed_buffers_are_left_out(folder: Path) -> None:
    def add(tensors: dict[str, np.ndarray]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)

    expected = logits(load(folder))
    edit_tensors(folder, add)

    assert torch.equal(logits(load(folder)), expected)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))

    with pytest.raises(
        ModelFileError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing: "
    ):
        load(folder)


def test_an_unknown_tensor_is_named_with_its_file(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors.update(extra=np.ones(2, np.float32)))

    with pytest.raises(ModelFileError, match=r"the first extra: .*model\.safetensors; download"):
        load(folder)


def test_a_misshapen_tensor_is_named_with_both_shapes(folder: Path) -> None:
    edit_json(folder / "config.json", intermediate_size=95)

    with pytest.raises(ModelFileError, match=r"\(96, 36\) where config\.json asks for \(95, 36\)"):
        load(folder)


def test_quantised_numbers_are_refused(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.update({"model.norm.weight": np.ones(36, np.int8)}))

    with pytest.raises(ModelFileError, match=r"model\.norm\.weight holds no floating-point"):
        load(folder)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda f: (f / "config.json").unlink(), r"missing: .*config\.json"),
        (lambda f: (f / "config.json").write_text("{"), r"damaged: .*config\.json"),
        (lambda f: (f / "config.json").write_text("[]"), r"damaged: .*config\.json"),
        (lambda f: edit_json(f / "config.json", vocab_size="many"), r"damaged: .*config\.json"),
        (lambda f: (f / "model.safetensors").unlink(), r"missing: .*model\.safetensors"),
        (lambda f: truncate(f / "model.safetensors"), r"damaged: .*model\.safetensors"),
        (lambda f: (f / "generation_config.json").write_text("?"), r"damaged: .*generation_config"),
        (
            lambda f: edit_json(f / "generation_config.json", eos_token_id="x"),
            r"damaged: .*generat",
        ),
    ],
    ids=[
        "no config",
        "torn config",
        "config is a list",
        "config has a wrong type",
        "no weights",
        "torn weights",
        "torn defaults",
        "defaults have a wrong type",
    ],
)
def test_a_missing_or_damaged_file_is_named_with_its_cure(
    folder: Path, damage: Callable[[Path], None], problem: str
) -> None:
    damage(folder)

    with pytest.raises(ModelFileError, match=f"{problem}.*; download the model folder again"):
        load(folder)


def test_a_missing_shard_and_a_damaged_index_are_named(folder: Path) -> None:
    shard(folder)
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(ModelFileError, match=r"missing: .*model-2\.safetensors"):
        load(folder)

    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelFileError, match=r"damaged: .*index\.json"):
        load(folder)


def test_a_changed_byte_is_found_where_a_manifest_exists(folder: Path) -> None:
    write_manifest(folder)
    load(folder)
    path = folder / "model.safetensors"
    contents = bytearray(path.read_bytes())
    contents[-1] ^= 1
    path.write_bytes(contents)

    with pytest.raises(ModelFileError, match=r"damaged: .*model\.safetensors; delete the folder"):
        load(folder)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": LLAMA3, "rope_theta": 50_000.0},
        {"rope_parameters": LLAMA3 | {"rope_theta": 50_000.0}},
        {"rope_parameters": LLAMA3 | {"rope_theta": 50_000.0}, "rope_scaling": LLAMA3},
        {"rope_scaling": LLAMA3, "rope_theta": 50_000.0, "sliding_window": None, "qk_norm": False},
    ],
)
def test_rope_is_obeyed_wherever_the_file_has_it(folder: Path, changes: dict[str, Any]) -> None:
    edit_json(folder / "config.json", **changes)

    _, config = find_architecture(folder)

    assert isinstance(config, LlamaConfig)
    assert config.rope_theta == 50_000
    assert config.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 64)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"model_type": "mamba"}, "model_type is 'mamba'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type is 'yarn'"),
        ({"quantization_config": {"bits": 4}}, "the weights are quantised"),
        ({"sliding_window": 64}, "sliding_window is 64"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "'sliding_attention'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures is"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": {"attention_factor": 2.0}}, "rope has 'attention_factor'"),
        (
            {"rope_parameters": {"rope_type": "default"}, "rope_scaling": LLAMA3},
            "rope_scaling and rope_parameters differ",
        ),
    ],
)
def test_what_this_engine_cannot_compute_is_refused(
    folder: Path, changes: dict[str, Any], what: str
) -> None:
    edit_json(folder / "config.json", **changes)

    with pytest.raises(UnsupportedModel, match=what):
        load(folder)


def test_the_digest_follows_contents_and_config(folder: Path, tmp_path: Path) -> None:
    digest = load(folder).weights_digest

    twin = write_tiny_model(tmp_path / "twin", **SMALL)
    other = write_tiny_model(tmp_path / "other", seed=1, **SMALL)
    edit_json(folder / "config.json", rope_theta=20000.0)

    assert load(twin).weights_digest == digest
    assert load(other).weights_digest != digest
    assert load(folder).weights_digest != digest


@pytest.mark.parametrize(
    ("generation", "stops", "sampling"),
    [
        (None, (2,), Sampling()),
        ({"do_sample": False, "eos_token_id": 2}, (2,), Sampling(temperature=0.0)),
        ({"do_sample": False, "temperature": 0.6}, (2,), Sampling(temperature=0.0)),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [5, 7]},
            (5, 7),
            Sampling(temperature=0.6, top_p=0.9),
        ),
        ({"top_k": 20, "temperature": None}, (2,), Sampling(top_k=20)),
    ],
)
def test_generation_defaults_are_what_the_folder_states(
    folder: Path, generation: dict[str, Any] | None, stops: tuple[int, ...], sampling: Sampling
) -> None:
    path = folder / "generation_config.json"
    path.unlink()
    if generation is not None:
        path.write_text(json.dumps(generation))

    loaded = load(folder)

    assert loaded.stop_token_ids == stops
    assert loaded.default_sampling == sampling
