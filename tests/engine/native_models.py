"""One model three times: in C, in torch's bfloat16, and in float32, by which both are judged."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.compute.backend import Backend
from engine.compute.kv_cache import KVCache
from engine.compute.loading import load_model
from engine.compute.native.library import Library
from engine.plan import Row

CPU = torch.device("cpu")
# Of the tiny model's random weights, measured: 0.041 at most in C, 0.064 in torch.
ROW_ERROR_MAX = 0.08


@dataclass(frozen=True)
class Computed:
    """One model and its cache, which begins full of NaN: what is read unwritten shows."""

    model: Backend
    cache: KVCache

    @torch.inference_mode()
    def logits(self, rows: Sequence[Row]) -> torch.Tensor:
        found = self.model.compute(self.cache, rows).clone()
        return found - found.mean(dim=1, keepdim=True)  # a shift of all changes no choice


@dataclass(frozen=True)
class Trio:
    native: Computed
    torch: Computed
    exact: Computed

    def compare(self, rows: Sequence[Row]) -> torch.Tensor:
        """Compute a step in all three; the C one must be as near to float32 as torch's is."""
        native, plain, exact = (each.logits(rows) for each in (self.native, self.torch, self.exact))
        assert (_errors(native, exact) < ROW_ERROR_MAX).all(), "a row is far from float32"
        assert _errors(native, exact).mean() < 2 * _errors(plain, exact).mean()
        return native


def _errors(found: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Each row's error, as a share of its logits' spread."""
    return (found - exact).norm(dim=1) / exact.norm(dim=1)


def trio(folder: Path, library: Library, *, num_blocks: int = 96) -> Trio:
    def computed(dtype: torch.dtype, library: Library | None = None) -> Computed:
        model = load_model(folder, dtype=dtype, device=CPU, library=library).backend
        cache = KVCache(model.shape, num_blocks=num_blocks, block_size=16, dtype=dtype, device=CPU)
        cache._blocks.fill_(torch.nan)
        return Computed(model, cache)

    return Trio(
        computed(torch.bfloat16, library), computed(torch.bfloat16), computed(torch.float32)
    )
