"""The one place that chooses what computes a model's steps, torch or C, and builds it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from engine.compute.dtype import read_cpuinfo
from engine.compute.kv_cache import KVCache
from engine.compute.native.library import Library, load_library, require_processor
from engine.compute.native.native_llama import NativeLlama, require_supported
from engine.compute.torch_ops import TorchOps
from engine.errors import KernelsUnavailable
from engine.model_files.weights import Weights
from engine.models.model import Attend, Model, ModelConfig, ModelShape, Ops
from engine.models.registry import Architecture, find_architecture
from engine.plan import Row


class Backend(Protocol):
    """A loaded model, as the model runner uses it."""

    @property
    def shape(self) -> ModelShape:
        """The model's shape."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The number format of the KV cache."""
        ...

    @property
    def device(self) -> torch.device:
        """The device of the KV cache and the logits."""
        ...

    def compute(self, cache: KVCache, rows: Sequence[Row]) -> torch.Tensor:
        """Write the K and V of all rows and return the logits of those that sample.

        [s, vocab_size] float32, each sampling row's last position, in order. The next call may
        overwrite them.
        """
        ...


class StepOps(Ops, Protocol):
    """The operations that a model is built from, and the attention of its steps."""

    def attention(self, cache: KVCache, rows: Sequence[Row]) -> Attend:
        """Plan the attention of one step."""
        ...


class ModelBackend:
    """A model of `engine.models` on the operations of one backend."""

    def __init__(self, model: Model, ops: StepOps) -> None:
        self.model = model
        self.shape = model.shape
        self.dtype = ops.dtype
        self.device = ops.device
        self._ops = ops

    def compute(self, cache: KVCache, rows: Sequence[Row]) -> torch.Tensor:
        """Compute a step, as `Backend.compute` describes it."""
        counts = [len(row.token_ids) for row in rows]
        token_ids = np.concatenate([row.token_ids for row in rows]).astype(np.int64)
        positions = np.concatenate(
            [np.arange(row.start, row.start + n) for row, n in zip(rows, counts, strict=True)]
        )
        sampled = (np.cumsum(counts) - 1)[[row.samples for row in rows]]
        return self.model.compute(
            torch.from_numpy(token_ids).to(self.device),
            torch.from_numpy(positions).to(self.device),
            self._ops.attention(cache, rows),
            torch.from_numpy(sampled).to(self.device),
        )


@dataclass(frozen=True, slots=True)
class Kernels:
    """The C library, or None for torch; `reason` states the choice for the operator."""

    library: Library | None
    reason: str


def choose_kernels(
    model_folder: Path,
    cache_folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    block_size: int,
    clock_ns: Callable[[], int],
) -> Kernels:
    """Choose C where model, processor and compiler allow it; compile the library first if needed.

    Raises ModelFileError or UnsupportedModel, as loading the model would.
    """
    cpuinfo, (_, config) = read_cpuinfo(), find_architecture(model_folder)
    try:
        require_supported(config, dtype=dtype, device=device, block_size=block_size)
        require_processor(cpuinfo)
        start_ns = clock_ns()
        library = load_library(cache_folder, cpuinfo=cpuinfo)
    except KernelsUnavailable as error:
        return Kernels(None, f"torch kernels: {error.reason}")
    seconds = (clock_ns() - start_ns) / 1e9
    tiles = " with AMX" if library.has_amx else ""
    return Kernels(library, f"C kernels{tiles}, ready in {seconds:.1f} s")


def build_backend(
    architecture: Architecture,
    config: ModelConfig,
    weights: Weights,
    *,
    dtype: torch.dtype,
    device: torch.device,
    library: Library | None,
) -> Backend:
    """Build a model from its weights: in C with `library`, else in torch."""
    if library is not None:
        return NativeLlama(config, weights, library)
    ops = TorchOps(dtype, device)
    return ModelBackend(architecture.model(config, weights, ops), ops)
