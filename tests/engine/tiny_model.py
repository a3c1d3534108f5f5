"""The recipe of the suite's tiny Llama: seeded, random, 4 layers, GQA, 1.9 M parameters.

Its vocabulary is SmolLM2's, so it runs behind SmolLM2's tokenizer. All parameters are random at a
scale where every part of the network changes the output: with the usual initialisation (norms of
one, tiny projections) a wrong rotation or a lost block hardly shows.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": 36,
    "intermediate_size": 96,
    "max_position_embeddings": 4096,
    "mlp_bias": False,
    "num_attention_heads": 6,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "vocab_size": 49152,
}


def write_tiny_model(
    folder: Path, *, seed: int = 0, tokenizer_from: Path | None = None, **changes: Any
) -> Path:
    """Write the model into `folder` and return it; `changes` replace fields of its config.

    `tokenizer_from` is a folder whose tokenizer files are copied in (the default model's).
    """
    config = CONFIG | changes
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    generation = {"bos_token_id": 1, "eos_token_id": 2, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    save_file(tiny_tensors(config, seed), folder / "model.safetensors", metadata={"format": "pt"})
    if tokenizer_from is not None:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(tokenizer_from / name, folder / name)
    return folder


def tiny_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Every tensor of the model, in float32."""
    chance = np.random.default_rng(seed)
    return {
        name: _values(name, shape, chance) for name, shape in sorted(tensor_shapes(config).items())
    }


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors that such a config asks for."""
    hidden, inner, head_dim = (
        config[name] for name in ("hidden_size", "intermediate_size", "head_dim")
    )
    q = config["num_attention_heads"] * head_dim
    kv = config["num_key_value_heads"] * head_dim
    attention = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden)}
    attention["o_proj"] = (hidden, q)
    mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        for part, linears, biased in (
            ("self_attn", attention, config["attention_bias"]),
            ("mlp", mlp, config["mlp_bias"]),
        ):
            for name, shape in linears.items():
                shapes[f"{layer}.{part}.{name}.weight"] = shape
                if biased:
                    shapes[f"{layer}.{part}.{name}.bias"] = shape[:1]
    return shapes


def _values(name: str, shape: tuple[int, ...], chance: np.random.Generator) -> np.ndarray:
    if name.endswith("norm.weight"):
        return chance.uniform(0.5, 1.5, shape).astype(np.float32)
    if name.endswith(".bias"):
        return chance.normal(0.0, 0.3, shape).astype(np.float32)
    scale = 1.0 if "embed_tokens" in name else 1.5 / np.sqrt(shape[-1])
    return chance.normal(0.0, scale, shape).astype(np.float32)
