"""Whether steps are computed in C or in torch, decided once at start, and why."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.compute.dtype import read_cpuinfo
from engine.compute.native.library import Library, load_library, require_processor
from engine.compute.native.llama import require_supported
from engine.errors import KernelsUnavailable
from engine.models.llama_config import LlamaConfig


@dataclass(frozen=True, slots=True)
class Kernels:
    """The C library, or None for torch; `reason` says which computes, in words for the operator."""

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
    """C where this model, processor and compiler allow it, compiled first if need be.

    Raises ModelFileError or UnsupportedModel, as loading the model would.
    """
    cpuinfo, model = read_cpuinfo(), LlamaConfig.read(model_folder)
    try:
        require_supported(model, dtype=dtype, device=device, block_size=block_size)
        require_processor(cpuinfo)
        start_ns = clock_ns()
        library = load_library(cache_folder, cpuinfo=cpuinfo)
    except KernelsUnavailable as error:
        return Kernels(None, f"torch kernels: {error.reason}")
    seconds = (clock_ns() - start_ns) / 1e9
    tiles = " with AMX" if library.has_amx else ""
    return Kernels(library, f"C kernels{tiles}, ready in {seconds:.1f} s")
