"""The parts that Llama-like models are made of: RMSNorm, rotary embedding, parameters."""

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it

from engine.model_files.weights import Weights
from engine.models.model import LinearOp, Ops


class RMSNorm:
    """x / rms(x) * weight, computed in float32 and rounded once to the model's dtype."""

    def __init__(self, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> None:
        self._weight = weight.float()
        self._eps = eps
        self._dtype = dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, hidden] float32 to [n, hidden]."""
        return F.rms_norm(x, self._weight.shape, self._weight, self._eps).to(self._dtype)


def rotate_(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Apply rotary embedding in place to `heads` [n, num_heads, head_dim].

    `cos` and `sin` are [n, 1, head_dim], the rows of `rotary_tables` at the tokens' positions.
    """
    rolled = heads.roll(heads.shape[-1] // 2, dims=-1).mul_(sin)
    heads.mul_(cos).add_(rolled)


class Parameters:
    """Takes tensors out of the weights, in the number format and on the device of `ops`."""

    def __init__(self, weights: Weights, ops: Ops) -> None:
        self._weights = weights
        self._ops = ops

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """Return the tensor `name`, which must have `shape`."""
        return self._weights.take(name, shape).to(self._ops.device, self._ops.dtype)

    def norm(self, name: str, size: int, eps: float) -> RMSNorm:
        """Return the norm over `size` numbers whose weight is `name`.weight."""
        weight = self._weights.take(f"{name}.weight", (size,))
        return RMSNorm(weight.to(self._ops.device), eps, self._ops.dtype)

    def linear(self, out_sizes: dict[str, int], in_size: int, *, has_bias: bool) -> LinearOp:
        """Return one linear for several with the same input, stacked in the order given."""
        weight = torch.cat(
            [self.tensor(f"{name}.weight", size, in_size) for name, size in out_sizes.items()]
        )
        if not has_bias:
            return self._ops.linear(weight)
        bias = [self.tensor(f"{name}.bias", size) for name, size in out_sizes.items()]
        return self._ops.linear(weight, torch.cat(bias))

    def head(self, embedding: torch.Tensor, *, is_tied: bool) -> LinearOp:
        """Return the output head, a linear to the vocabulary; a tied one is the embedding."""
        if is_tied:
            self._weights.drop("lm_head.weight")  # some folders store the tied copy
            return self._ops.linear(embedding)
        return self._ops.linear(self.tensor("lm_head.weight", *embedding.shape))
