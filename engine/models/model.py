"""The interface of a model: its shape, its mathematics and the operations it is built from."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import torch

# Attention of one layer: (q [n, heads, d], k and v [n, 2 x kv_heads, d], layer) -> [n, heads x d].
# Writes the layer's K and V of this step into the cache before it attends.
Attend = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
# [n, inputs] to [n, outputs].
LinearOp = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What the engine outside `models` needs to know of a model."""

    vocab_size: int
    max_model_len: int
    num_layers: int
    num_kv_heads: int
    head_dim: int


class Ops(Protocol):
    """The operations of one backend, on one device and in one number format."""

    @property
    def dtype(self) -> torch.dtype:
        """The number format of activations and weights."""
        ...

    @property
    def device(self) -> torch.device:
        """The device that weights are placed on."""
        ...

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> LinearOp:
        """Return y = x W^T + b for a `weight` [outputs, inputs], packed for the backend."""
        ...


class ModelConfig(Protocol):
    """The configuration of a model of one family, read from config.json."""

    @classmethod
    def from_json(cls, raw: dict[str, Any], path: Path) -> Self:
        """Read the object in `path`.

        Raises UnsupportedModel if the family's class does not compute what it describes. May raise
        KeyError, TypeError or ValueError for a damaged file.
        """
        ...

    @property
    def shape(self) -> ModelShape:
        """The model's shape."""
        ...


class Model(Protocol):
    """A model with its weights. It is given the step's attention, already planned."""

    @property
    def shape(self) -> ModelShape:
        """The model's shape."""
        ...

    def compute(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        sampled: torch.Tensor,
    ) -> torch.Tensor:
        """Compute a flat batch of tokens and return the logits of those that are sampled.

        token_ids  [n] int64, of any number of sequences
        positions  [n] int64, each token's place in its sequence
        attend     called once a layer, in order
        sampled    [s] int64, indices into the batch
        returns    [s, vocab_size] float32
        """
        ...
