"""NativeLlama: a Llama whose steps run in C, with weights packed for the kernels.

`engine.models.llama` is the reference, the same mathematics; it runs where this cannot.
"""

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from engine.compute.kv_cache import KVCache
from engine.compute.native.library import Library
from engine.compute.native.structures import (
    BatchStruct,
    LayerStruct,
    LinearStruct,
    ModelStruct,
)
from engine.errors import KernelsUnavailable
from engine.model_files.weights import Weights
from engine.models.llama_config import LlamaConfig, rotary_tables
from engine.models.model import ModelConfig
from engine.plan import Row

# Outputs of a panel and inputs of a gemm tile; sizes are padded to them.
_PANEL = 32
# Limits of the C side: query heads that share a KV head, and a head's size.
_GROUP_SIZE_MAX, _HEAD_DIM_MAX = 16, 256


def require_supported(
    config: ModelConfig, *, dtype: torch.dtype, device: torch.device, block_size: int
) -> None:
    """Raise KernelsUnavailable if the kernels cannot compute this model in this way."""
    if type(config) is not LlamaConfig:
        raise KernelsUnavailable("the model is no Llama")
    group_size, rest = divmod(config.num_attention_heads, config.num_key_value_heads)
    if device.type != "cpu":
        raise KernelsUnavailable(f"the device is {device.type}")
    if dtype != torch.bfloat16:
        raise KernelsUnavailable(f"the number format is {str(dtype).removeprefix('torch.')}")
    if config.head_dim % 32 or config.head_dim > _HEAD_DIM_MAX:
        raise KernelsUnavailable(f"the model's heads have {config.head_dim} dimensions")
    if rest or group_size > _GROUP_SIZE_MAX:
        raise KernelsUnavailable(
            f"{config.num_attention_heads} heads share {config.num_key_value_heads} KV heads"
        )
    if block_size % 16:
        raise KernelsUnavailable(f"a block has {block_size} tokens")


class NativeLlama:
    """A Llama model in bfloat16 on the CPU, whose steps `library` computes."""

    dtype = torch.bfloat16
    device = torch.device("cpu")

    def __init__(self, config: ModelConfig, weights: Weights, library: Library) -> None:
        assert type(config) is LlamaConfig, "the kernels were chosen for another model"
        self.shape = config.shape
        self._config = config
        self._library = library
        self._weights = weights
        self._kept: list[torch.Tensor] = []  # C has pointers to them
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._vocab_width = _padded(config.vocab_size)
        self._logits = torch.empty((0, self._vocab_width))
        size = (config.vocab_size, config.hidden_size)
        embedding = self._linear(self._weight("model.embed_tokens", *size))
        if config.tie_word_embeddings:
            weights.drop("lm_head.weight")  # some folders store the tied copy
            lm_head = embedding
        else:
            lm_head = self._linear(self._weight("lm_head", *size))
        self._layers = (LayerStruct * config.num_hidden_layers)(
            *(self._layer(f"model.layers.{i}") for i in range(config.num_hidden_layers))
        )
        cos, sin = rotary_tables(config)
        half = config.head_dim // 2
        self._model = ModelStruct(
            hidden_size=config.hidden_size,
            hidden_width=_padded(config.hidden_size),
            mlp_width=_padded(config.intermediate_size),
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            vocab_width=self._vocab_width,
            eps=config.rms_norm_eps,
            layers=ctypes.addressof(self._layers),
            embedding=embedding.weight,
            final_norm=self._norm("model.norm"),
            lm_head=lm_head,
            cos=self._keep(cos[:, half:]),
            sin=self._keep(sin[:, half:]),
        )

    def compute(self, cache: KVCache, rows: Sequence[Row]) -> torch.Tensor:
        """Write the K and V of all rows; return [s, vocab_size] logits of those that sample.

        The logits are float32, in memory that the next call overwrites.
        """
        token_ids = np.concatenate([row.token_ids for row in rows], dtype=np.int32)
        blocks = np.concatenate([row.block_table for row in rows], dtype=np.int32)
        start = np.array([row.start for row in rows], dtype=np.int32)
        counts = np.array([len(row.token_ids) for row in rows])
        table_sizes = np.array([len(row.block_table) for row in rows])
        first_token = np.append(0, counts.cumsum()).astype(np.int32)
        first_block = np.append(0, table_sizes.cumsum()).astype(np.int32)
        sampled = first_token[1:][[row.samples for row in rows]] - 1
        # C reads and writes by these numbers, unchecked.
        ends = start + counts
        _require(bool(counts.min() > 0), "a row has no token")
        _require(bool((ends <= table_sizes * cache.block_size).all()), "a block table is short")
        _require(_are_below(cache.num_blocks, blocks), "a block table names no block")
        _require(_are_below(self._config.vocab_size, token_ids), "a token is not in the vocabulary")
        limit = self._config.max_position_embeddings
        _require(_are_below(limit, start, ends - 1), "no such position")
        logits = self._logits_of(len(sampled))
        batch = BatchStruct(
            num_rows=len(rows),
            num_tokens=len(token_ids),
            num_sampled=len(sampled),
            token_ids=token_ids.ctypes.data,
            first_token=first_token.ctypes.data,
            start=start.ctypes.data,
            first_block=first_block.ctypes.data,
            blocks=blocks.ctypes.data,
            sampled=sampled.ctypes.data,
            cache=cache.address,
            block_size=cache.block_size,
            logits=logits.data_ptr(),
        )
        scratch = self._scratch_for(batch)
        self._library.run(self._model, batch, scratch, num_threads=torch.get_num_threads())
        return logits[:, : self._config.vocab_size]

    def _logits_of(self, num_rows: int) -> torch.Tensor:
        # Kept: fresh memory for 64 rows costs a fifth of their step.
        if num_rows > len(self._logits):
            self._logits = torch.empty((num_rows, self._vocab_width), dtype=torch.float32)
        return self._logits[:num_rows]

    def _scratch_for(self, batch: BatchStruct) -> int:
        size = self._library.scratch_bytes(self._model, batch)
        if size > len(self._scratch):
            self._scratch = torch.empty(size + size // 4, dtype=torch.uint8)
        return self._scratch.data_ptr()

    def _layer(self, prefix: str) -> LayerStruct:
        config = self._config
        hidden, inner, size = config.hidden_size, config.intermediate_size, config.head_dim
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        q_size, kv_size = config.num_attention_heads * size, config.num_key_value_heads * size
        qkv = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        biased = config.attention_bias
        return LayerStruct(
            qkv=self._linear(
                torch.cat([self._weight(f"{attention}.{n}", m, hidden) for n, m in qkv.items()]),
                torch.cat([self._bias(f"{attention}.{n}", m) for n, m in qkv.items()])
                if biased
                else None,
            ),
            output=self._linear(
                self._weight(f"{attention}.o_proj", hidden, q_size),
                self._bias(f"{attention}.o_proj", hidden) if biased else None,
            ),
            gate_up=self._linear(
                _interleave(*(self._weight(f"{mlp}.{n}_proj", inner, hidden) for n in _GATED)),
                _interleave(*(self._bias(f"{mlp}.{n}_proj", inner) for n in _GATED))
                if config.mlp_bias
                else None,
            ),
            down=self._linear(
                self._weight(f"{mlp}.down_proj", hidden, inner),
                self._bias(f"{mlp}.down_proj", hidden) if config.mlp_bias else None,
            ),
            attention_norm=self._norm(f"{prefix}.input_layernorm"),
            mlp_norm=self._norm(f"{prefix}.post_attention_layernorm"),
        )

    def _linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> LinearStruct:
        """Pack [outputs, inputs] as [outputs / 32, inputs / 2, 32, 2], padded with zeros."""
        outputs, inputs = (_padded(size) for size in weight.shape)
        packed = _pad(weight, rows=outputs, columns=inputs).view(-1, _PANEL, inputs // 2, 2)
        return LinearStruct(
            weight=self._keep(packed.transpose(1, 2)),
            bias=None if bias is None else self._keep(_pad(bias.float(), columns=outputs)),
            num_inputs=inputs,
            num_panels=outputs // _PANEL,
        )

    def _norm(self, name: str) -> int:
        weight = self._weights.take(f"{name}.weight", (self._config.hidden_size,)).float()
        return self._keep(_pad(weight, columns=_padded(self._config.hidden_size)))

    def _weight(self, name: str, *shape: int) -> torch.Tensor:
        return self._tensor(f"{name}.weight", *shape)

    def _bias(self, name: str, size: int) -> torch.Tensor:
        return self._tensor(f"{name}.bias", size)

    def _tensor(self, name: str, *shape: int) -> torch.Tensor:
        return self._weights.take(name, shape).to(self.dtype)

    def _keep(self, tensor: torch.Tensor) -> int:
        self._kept.append(tensor.contiguous())
        return self._kept[-1].data_ptr()


_GATED = ("gate", "up")


def _require(holds: bool, otherwise: str) -> None:
    """Raise AssertionError unless it holds, also where assertions are switched off."""
    if not holds:
        raise AssertionError(otherwise)


def _are_below(limit: int, *numbers: np.ndarray) -> bool:
    return all(n.min(initial=0) >= 0 and n.max(initial=-1) < limit for n in numbers)


def _padded(size: int) -> int:
    return -(-size // _PANEL) * _PANEL


def _pad(tensor: torch.Tensor, *, columns: int, rows: int | None = None) -> torch.Tensor:
    """Append zeros below and to the right of a matrix, or after a vector."""
    after = [0, columns - tensor.shape[-1]]
    if rows is not None:
        after += [0, rows - tensor.shape[0]]
    return torch.nn.functional.pad(tensor, after)


def _interleave(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Alternate sixteen rows of `gate` and of `up`: every panel of outputs has both."""
    half = _PANEL // 2
    rows = _padded(len(gate))
    flat = [tensor.reshape(len(tensor), -1) for tensor in (gate, up)]
    halves = [_pad(t, rows=rows, columns=t.shape[1]).view(-1, half, t.shape[1]) for t in flat]
    return torch.stack(halves, dim=1).view(2 * rows, *gate.shape[1:])
