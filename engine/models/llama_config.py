"""LlamaConfig: the configuration of a Llama model, read from config.json, and its rotary tables."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.errors import UnsupportedModel
from engine.models.model import ModelShape

_ARCHITECTURE = "LlamaForCausalLM"
# Fields by which other models, called Llama all the same, compute something else; with the values
# that change nothing, beside null, false and 0.
_FOREIGN: dict[str, tuple[object, ...]] = {
    "sliding_window": (),
    "use_sliding_window": (),
    "attention_chunk_size": (),
    "attention_sinks": (),
    "no_rope_layers": ([],),
    "partial_rotary_factor": (1,),
    "rope_interleaved": (),
    "qk_norm": (),
    "use_qk_norm": (),
    "clip_qkv": (),
    "attention_multiplier": (),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "logits_scaling": (1,),
    "logit_scale": (1,),
    "scale_emb": (1,),
    "scale_depth": (),
    "query_pre_attn_scalar": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "num_local_experts": (1,),
    "num_experts": (1,),
    "add_cross_attention": (),
    "is_encoder_decoder": (),
}
_ROPE_FIELDS = {
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "partial_rotary_factor",
}


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3's scaling of the rotary frequencies (`rope_type` "llama3")."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """A Llama model's configuration; names as in config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool

    @classmethod
    def from_json(cls, raw: dict[str, Any], path: Path) -> "LlamaConfig":
        """Read the object in `path`. Raises as `ModelConfig.from_json` does."""
        _refuse_foreign(raw, path)
        heads = int(raw["num_attention_heads"])
        rope = raw.get("rope_parameters") or {}  # transformers 5 keeps all of rope in here
        scaling = _rope_scaling(rope, path)
        if raw.get("rope_scaling"):  # where transformers 4 keeps it; some files have both
            older = _rope_scaling(raw["rope_scaling"], path)
            if rope and older != scaling:
                raise UnsupportedModel(path, "rope_scaling and rope_parameters differ")
            scaling = older
            rope = raw["rope_scaling"] | rope
        return cls(
            vocab_size=int(raw["vocab_size"]),
            hidden_size=int(raw["hidden_size"]),
            intermediate_size=int(raw["intermediate_size"]),
            num_hidden_layers=int(raw["num_hidden_layers"]),
            num_attention_heads=heads,
            num_key_value_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or raw["hidden_size"] // heads),
            max_position_embeddings=int(raw["max_position_embeddings"]),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=float(rope.get("rope_theta", raw.get("rope_theta", 10_000.0))),
            rope_scaling=scaling,
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            attention_bias=bool(raw.get("attention_bias", False)),
            mlp_bias=bool(raw.get("mlp_bias", False)),
        )

    @property
    def shape(self) -> ModelShape:
        """What the engine outside `models` needs to know."""
        return ModelShape(
            vocab_size=self.vocab_size,
            max_model_len=self.max_position_embeddings,
            num_layers=self.num_hidden_layers,
            num_kv_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
        )


def _refuse_foreign(raw: dict[str, Any], path: Path) -> None:
    """Raise UnsupportedModel for what changes the computation and is not computed here."""
    if raw.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(path, f"hidden_act is {raw['hidden_act']!r}, not 'silu'")
    if raw.get("quantization_config"):
        raise UnsupportedModel(path, "the weights are quantised")
    architectures = raw.get("architectures") or [_ARCHITECTURE]
    if _ARCHITECTURE not in architectures:
        raise UnsupportedModel(path, f"architectures is {architectures!r}, not {_ARCHITECTURE!r}")
    for name, neutral in _FOREIGN.items():
        value = raw.get(name)
        if value not in (None, False, *neutral):
            raise UnsupportedModel(path, f"{name} is {value!r}, which this engine does not compute")
    kinds = set(raw.get("layer_types") or ()) - {"full_attention"}
    if kinds:
        raise UnsupportedModel(path, f"layer_types has {min(kinds)!r}, not only 'full_attention'")


def _rope_scaling(raw: dict[str, Any], path: Path) -> RopeScaling | None:
    kind = raw.get("rope_type", raw.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise UnsupportedModel(path, f"rope_type is {kind!r}, not 'default' or 'llama3'")
    if unknown := set(raw) - _ROPE_FIELDS:
        raise UnsupportedModel(
            path, f"rope has {min(unknown)!r}, which this engine does not compute"
        )
    if (share := raw.get("partial_rotary_factor", 1)) != 1:
        raise UnsupportedModel(path, f"partial_rotary_factor is {share!r}, not 1")
    if kind == "default":
        return None
    return RopeScaling(
        factor=float(raw["factor"]),
        low_freq_factor=float(raw["low_freq_factor"]),
        high_freq_factor=float(raw["high_freq_factor"]),
        original_max_position_embeddings=int(raw["original_max_position_embeddings"]),
    )


def rotary_tables(config: LlamaConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and signed sines, each [max_position_embeddings, head_dim] float32.

    The first half of each sine row is negated, so that rotating x by halves is
    `x * cos + roll(x, head_dim / 2) * sin`.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    if config.rope_scaling is not None:
        frequencies = _scaled(frequencies, config.rope_scaling)
    positions = torch.arange(config.max_position_embeddings, dtype=torch.float32)
    angles = torch.outer(positions, frequencies)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def _scaled(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Divide low frequencies by `factor`, keep high ones, blend between.

    Source: the Llama 3.1 model description; a wave is long when it turns fewer than
    `low_freq_factor` times in the original context, short above `high_freq_factor` times.
    """
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    spread = scaling.high_freq_factor - scaling.low_freq_factor
    keep = ((turns - scaling.low_freq_factor) / spread).clamp(0.0, 1.0)
    return keep * frequencies + (1.0 - keep) * frequencies / scaling.factor
