"""Converts a GGUF of the llama architecture into a Hugging Face folder.

Weights are stored in float32: dequantised 4-bit values (scale x q + minimum) do not fit bfloat16,
and the float32 parity test needs them exactly. The engine casts once, at load.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from engine.model_files.gguf import GGUFFile

CONTROL_TOKEN = 3  # the GGUF token type of special tokens

_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def convert(source: GGUFFile, folder: Path, progress: Callable[[str], None]) -> None:
    """Write config, generation defaults, tokenizer and weights of `source` into `folder`."""
    write_json(folder / "config.json", model_config(source))
    write_json(folder / "generation_config.json", generation_config(source))
    write_json(folder / "tokenizer.json", tokenizer(source))
    write_json(folder / "tokenizer_config.json", tokenizer_config(source))
    tensors = {}
    for index, name in enumerate(source.tensors, start=1):
        if index % 34 == 0 or index == len(source.tensors):
            progress(f"converting tensor {index}/{len(source.tensors)}")
        tensors[tensor_name(name)] = tensor_values(source, name)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # readable like the rest; safetensors writes 0600


def tensor_name(name: str) -> str:
    """Return the Hugging Face name of a GGUF tensor: `blk.3.attn_q` is layer 3's `q_proj`."""
    if not name.startswith("blk."):
        stem, _, suffix = name.rpartition(".")
        return f"{_TOP_NAMES[stem]}.{suffix}"
    _, layer, stem, suffix = name.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[stem]}.{suffix}"


def tensor_values(source: GGUFFile, name: str) -> np.ndarray:
    """Return the tensor in float32, with the rows of Q and K in Hugging Face's order."""
    values = source.read(name)
    if ".attn_q." in name:
        return _halves(values, source.metadata["llama.attention.head_count"])
    if ".attn_k." in name:
        return _halves(values, source.metadata["llama.attention.head_count_kv"])
    return values


def _halves(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder each head's rows for rotary embedding by halves.

    GGUF pairs rows (0, 1), (2, 3), ...; Hugging Face pairs (0, d/2), (1, d/2 + 1), ...
    """
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def model_config(source: GGUFFile) -> dict[str, Any]:
    """Return the contents of `config.json`."""
    meta = source.metadata
    heads = meta["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
        "head_dim": meta["llama.embedding_length"] // heads,
        "hidden_act": "silu",
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "max_position_embeddings": meta["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": meta["llama.block_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        # The metadata holds float32; six digits give back the number that was meant.
        "rms_norm_eps": float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_scaling": None,
        "rope_theta": float(meta["llama.rope.freq_base"]),
        "tie_word_embeddings": "output.weight" not in source.tensors,
        "torch_dtype": "float32",
        "vocab_size": meta["llama.vocab_size"],
    }


def generation_config(source: GGUFFile) -> dict[str, Any]:
    """Return `generation_config.json`: greedy, ending at the end-of-turn token."""
    meta = source.metadata
    return {
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
        "do_sample": False,
    }


def tokenizer(source: GGUFFile) -> dict[str, Any]:
    """Return `tokenizer.json`: byte-level BPE with single digits, the `smollm` pre-tokenizer."""
    meta = source.metadata
    tokens = meta["tokenizer.ggml.tokens"]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": token_id,
                "content": tokens[token_id],
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for token_id, kind in enumerate(meta["tokenizer.ggml.token_type"])
            if kind == CONTROL_TOKEN
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                byte_level | {"use_regex": True},
            ],
        },
        "post_processor": None,
        "decoder": byte_level | {"use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in meta["tokenizer.ggml.merges"]],
        },
    }


def tokenizer_config(source: GGUFFile) -> dict[str, Any]:
    """Return `tokenizer_config.json`: the named special tokens and the chat template."""
    meta = source.metadata
    tokens = meta["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": tokens[meta["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[meta["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[meta["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta["llama.context_length"],
        "chat_template": meta["tokenizer.chat_template"],
    }


def write_json(path: Path, value: object) -> None:
    """Write `value` as readable UTF-8 JSON."""
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
