"""An oracle: Llama recomputed from the first token, unfused, without cache or batch."""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file


def naive_logits(folder: Path, tokens: list[int]) -> torch.Tensor:
    """Logits [n, vocab_size] of every position of one sequence, in float32."""
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    heads, kv_heads, dim = (
        config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        y = x @ weights[f"{name}.weight"].T
        return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"])
        return x * scale * weights[f"{name}.weight"]

    def rotate(x: torch.Tensor) -> torch.Tensor:  # [n, heads, dim], one position at a time
        out = torch.empty_like(x)
        for position in range(x.shape[0]):
            for i in range(dim // 2):
                angle = position / config["rope_theta"] ** (2 * i / dim)
                a, b = x[position, :, i], x[position, :, i + dim // 2]
                out[position, :, i] = a * math.cos(angle) - b * math.sin(angle)
                out[position, :, i + dim // 2] = b * math.cos(angle) + a * math.sin(angle)
        return out

    n = len(tokens)
    x = weights["model.embed_tokens.weight"][tokens]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        h = norm(x, f"{layer}.input_layernorm")
        q = rotate(linear(h, f"{layer}.self_attn.q_proj").view(n, heads, dim))
        k = rotate(linear(h, f"{layer}.self_attn.k_proj").view(n, kv_heads, dim))
        v = linear(h, f"{layer}.self_attn.v_proj").view(n, kv_heads, dim)
        attended = torch.zeros(n, heads, dim)
        for head in range(heads):
            shared = head // (heads // kv_heads)
            scores = q[:, head] @ k[:, shared].T / math.sqrt(dim)
            scores += torch.full((n, n), -torch.inf).triu(1)
            attended[:, head] = scores.softmax(-1) @ v[:, shared]
        x = x + linear(attended.reshape(n, -1), f"{layer}.self_attn.o_proj")
        h = norm(x, f"{layer}.post_attention_layernorm")
        gate = linear(h, f"{layer}.mlp.gate_proj")
        up = linear(h, f"{layer}.mlp.up_proj")
        x = x + linear(gate * gate.sigmoid() * up, f"{layer}.mlp.down_proj")
    head = "lm_head" if "lm_head.weight" in weights else "model.embed_tokens"
    return norm(x, "model.norm") @ weights[f"{head}.weight"].T
