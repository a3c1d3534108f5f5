"""The operations of the torch backend: linears, and the attention of a step."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.compute.kv_cache import KVCache
from engine.compute.torch_attention import PagedAttention
from engine.compute.torch_linear import Linear
from engine.plan import Row


@dataclass(frozen=True, slots=True)
class TorchOps:
    """Plain torch, on any device and in any number format."""

    dtype: torch.dtype
    device: torch.device

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """Return y = x W^T + b for a `weight` [outputs, inputs]."""
        return Linear(weight, bias)

    def attention(self, cache: KVCache, rows: Sequence[Row]) -> PagedAttention:
        """Plan the attention of one step."""
        return PagedAttention(cache, rows, self.dtype)
