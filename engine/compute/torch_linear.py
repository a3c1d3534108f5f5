"""Linears in torch: y = x W^T + b, packed for oneDNN where that is faster."""

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it

# Batch size for which oneDNN lays out packed weights: best or equal from 1 row to 2,048.
_PACK_FOR_ROWS = 64


class Linear:
    """y = x W^T + b. On CPU, bfloat16 weights are packed once into oneDNN's layout.

    Otherwise every call packs them, which takes 25-50 % of its time for small batches.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._bias = bias
        self._packed = (
            weight.device.type == "cpu"
            and weight.dtype == torch.bfloat16
            and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        )
        self._weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_FOR_ROWS)
            if self._packed
            else weight
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, inputs] to [n, outputs]."""
        if self._packed:
            num_rows = len(x)
            if missing := _num_padded(num_rows) - num_rows:
                x = F.pad(x, (0, 0, 0, missing))
            y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self._weight, self._bias, "none", [], ""
            )
            return y[:num_rows]
        return F.linear(x, self._weight, self._bias)


def _num_padded(num_rows: int) -> int:
    """Round a number of rows up, so that few different ones occur.

    OneDNN compiles kernels for each number of rows and keeps them: 1.5 to 2 MB for a whole model.
    """
    unit = 1 if num_rows <= 8 else 8 if num_rows <= 64 else 32 if num_rows <= 512 else 128
    return -(-num_rows // unit) * unit
