"""Llama: the mathematics of one step over a flat batch of tokens from any number of sequences.

Linears run on all tokens of the step at once. Only attention depends on sequences; it is passed in,
planned for the step.
"""

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it

from engine.model_files.weights import Weights
from engine.models.layers import Parameters, rotate_
from engine.models.llama_config import LlamaConfig, rotary_tables
from engine.models.model import Attend, ModelShape, Ops


class Llama:
    """A Llama model, in the number format and on the device of `ops`."""

    def __init__(self, config: LlamaConfig, weights: Weights, ops: Ops) -> None:
        self._config = config
        parameters = Parameters(weights, ops)
        size = (config.vocab_size, config.hidden_size)
        self._embedding = parameters.tensor("model.embed_tokens.weight", *size)
        self._layers = [
            _DecoderLayer(config, parameters, i) for i in range(config.num_hidden_layers)
        ]
        self._norm = parameters.norm("model.norm", config.hidden_size, config.rms_norm_eps)
        self._head = parameters.head(self._embedding, is_tied=config.tie_word_embeddings)
        cos, sin = rotary_tables(config)
        self._cos = cos.to(ops.device, ops.dtype).unsqueeze(1)
        self._sin = sin.to(ops.device, ops.dtype).unsqueeze(1)

    @property
    def shape(self) -> ModelShape:
        """What the engine outside `models` needs to know."""
        return self._config.shape

    def compute(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        sampled: torch.Tensor,
    ) -> torch.Tensor:
        """Compute a flat batch, as `Model.compute` describes it."""
        # The sum over the layers stays in float32: in bfloat16 it is most of the logits' error.
        x = F.embedding(token_ids, self._embedding).float()
        cos, sin = self._cos[positions], self._sin[positions]
        for index, layer in enumerate(self._layers):
            x = layer.compute(x, cos, sin, attend, index)
        if not len(sampled):
            return x.new_empty((0, self._config.vocab_size), dtype=torch.float32)
        return self._head(self._norm(x[sampled])).float()


class _DecoderLayer:
    """Attention and feed-forward, each behind a norm and beside a residual."""

    def __init__(self, config: LlamaConfig, parameters: Parameters, index: int) -> None:
        prefix = f"model.layers.{index}"
        hidden, inner, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self._num_heads = config.num_attention_heads
        self._num_kv_heads = config.num_key_value_heads
        self._head_dim = config.head_dim
        self._qkv = parameters.linear(
            {
                f"{prefix}.self_attn.q_proj": q_size,
                f"{prefix}.self_attn.k_proj": kv_size,
                f"{prefix}.self_attn.v_proj": kv_size,
            },
            hidden,
            has_bias=config.attention_bias,
        )
        self._output = parameters.linear(
            {f"{prefix}.self_attn.o_proj": hidden}, q_size, has_bias=config.attention_bias
        )
        self._gate_up = parameters.linear(
            {f"{prefix}.mlp.gate_proj": inner, f"{prefix}.mlp.up_proj": inner},
            hidden,
            has_bias=config.mlp_bias,
        )
        self._down = parameters.linear(
            {f"{prefix}.mlp.down_proj": hidden}, inner, has_bias=config.mlp_bias
        )
        self._attention_norm = parameters.norm(f"{prefix}.input_layernorm", hidden, eps)
        self._mlp_norm = parameters.norm(f"{prefix}.post_attention_layernorm", hidden, eps)

    def compute(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend, index: int
    ) -> torch.Tensor:
        # One row: | q heads | k heads | v heads |, the first two rotated in place.
        heads = self._qkv(self._attention_norm(x)).view(x.shape[0], -1, self._head_dim)
        rotate_(heads[:, : self._num_heads + self._num_kv_heads], cos, sin)
        attended = attend(heads[:, : self._num_heads], heads[:, self._num_heads :], index)
        x = x + self._output(attended)
        gate, up = self._gate_up(self._mlp_norm(x)).chunk(2, dim=-1)
        return x + self._down(F.silu(gate) * up)
