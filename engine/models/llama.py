"""Llama in plain torch: one forward over a flat batch of tokens from any number of sequences.

Every linear runs on all tokens of the step at once; only attention knows sequences, so it is
passed in.
"""

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it

from engine.model_files.weights import Weights
from engine.models.layers import Attend, Linear, RMSNorm, rotate_
from engine.models.llama_config import LlamaConfig, rotary_tables


class Llama:
    """A Llama model. `dtype` and `device` are those of its activations."""

    def __init__(
        self, config: LlamaConfig, weights: Weights, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        loader = _Loader(weights, dtype, device)
        size = (config.vocab_size, config.hidden_size)
        self._embedding = loader.tensor("model.embed_tokens.weight", *size)
        self._layers = [_Layer(config, loader, i) for i in range(config.num_hidden_layers)]
        self._norm = loader.norm("model.norm", config)
        if config.tie_word_embeddings:
            weights.drop("lm_head.weight")  # some folders store the tied copy
            self._head = Linear(self._embedding)
        else:
            self._head = Linear(loader.tensor("lm_head.weight", *size))
        cos, sin = rotary_tables(config)
        self._cos = cos.to(device, dtype).unsqueeze(1)
        self._sin = sin.to(device, dtype).unsqueeze(1)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        sampled: torch.Tensor,
    ) -> torch.Tensor:
        """Compute a flat batch and return the logits of the rows that are sampled.

        tokens     [n] int64, positions [n] int64, in any order that `attend` understands
        attend     writes the step's K and V and attends; called once a layer, in order
        sampled    [s] int64, rows whose logits are wanted
        returns    [s, vocab_size] float32
        """
        # The sum over the layers stays in float32: in bfloat16 it is most of the logits' error.
        x = F.embedding(tokens, self._embedding).float()
        cos, sin = self._cos[positions], self._sin[positions]
        for index, layer in enumerate(self._layers):
            x = layer.forward(x, cos, sin, attend, index)
        if not len(sampled):
            return x.new_empty((0, self.config.vocab_size), dtype=torch.float32)
        return self._head(self._norm(x[sampled])).float()


class _Layer:
    """Attention and feed-forward, each behind a norm and beside a residual."""

    def __init__(self, config: LlamaConfig, loader: "_Loader", index: int) -> None:
        prefix = f"model.layers.{index}"
        hidden, inner = config.hidden_size, config.intermediate_size
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self._num_heads = config.num_attention_heads
        self._num_kv_heads = config.num_key_value_heads
        self._head_dim = config.head_dim
        self._qkv = loader.linear(
            {
                f"{prefix}.self_attn.q_proj": q_size,
                f"{prefix}.self_attn.k_proj": kv_size,
                f"{prefix}.self_attn.v_proj": kv_size,
            },
            hidden,
            has_bias=config.attention_bias,
        )
        self._output = loader.linear(
            {f"{prefix}.self_attn.o_proj": hidden}, q_size, has_bias=config.attention_bias
        )
        self._gate_up = loader.linear(
            {f"{prefix}.mlp.gate_proj": inner, f"{prefix}.mlp.up_proj": inner},
            hidden,
            has_bias=config.mlp_bias,
        )
        self._down = loader.linear(
            {f"{prefix}.mlp.down_proj": hidden}, inner, has_bias=config.mlp_bias
        )
        self._attention_norm = loader.norm(f"{prefix}.input_layernorm", config)
        self._mlp_norm = loader.norm(f"{prefix}.post_attention_layernorm", config)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend, index: int
    ) -> torch.Tensor:
        # One row: | q heads | k heads | v heads |, the first two rotated in place.
        heads = self._qkv(self._attention_norm(x)).view(x.shape[0], -1, self._head_dim)
        rotate_(heads[:, : self._num_heads + self._num_kv_heads], cos, sin)
        attended = attend(heads[:, : self._num_heads], heads[:, self._num_heads :], index)
        x = x + self._output(attended)
        gate, up = self._gate_up(self._mlp_norm(x)).chunk(2, dim=-1)
        return x + self._down(F.silu(gate) * up)


class _Loader:
    """Takes tensors out of the weights in the model's dtype, on its device."""

    def __init__(self, weights: Weights, dtype: torch.dtype, device: torch.device) -> None:
        self._weights = weights
        self._dtype = dtype
        self._device = device

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        return self._weights.take(name, shape).to(self._device, self._dtype)

    def norm(self, name: str, config: LlamaConfig) -> RMSNorm:
        weight = self._weights.take(f"{name}.weight", (config.hidden_size,))
        return RMSNorm(weight.to(self._device), config.rms_norm_eps, self._dtype)

    def linear(self, out_sizes: dict[str, int], in_size: int, *, has_bias: bool) -> Linear:
        """One linear out of several with the same input, stacked in the order given."""
        weight = torch.cat(
            [self.tensor(f"{name}.weight", size, in_size) for name, size in out_sizes.items()]
        )
        if not has_bias:
            return Linear(weight)
        bias = [self.tensor(f"{name}.bias", size) for name, size in out_sizes.items()]
        return Linear(weight, torch.cat(bias))
