"""Fixtures of the engine's tests, which need no network, no tokenizer and no package but its own.

What needs the default model or `transformers` is in tests/parity.
"""

from pathlib import Path

import pytest
import torch

from engine.dtype import read_cpuinfo
from engine.native.library import Library, load_library
from tests.engine.tiny_model import write_tiny_model

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A seeded random Llama without tokenizer."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def kernels_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where this run's kernels are compiled."""
    return tmp_path_factory.mktemp("kernels") / "cache"


@pytest.fixture(scope="session")
def kernels(kernels_folder: Path) -> dict[str, Library]:
    """The C kernels as this processor can have them, and as any can."""
    return {
        name: load_library(kernels_folder, cpuinfo=read_cpuinfo(), is_portable=name == "portable")
        for name in ("native", "portable")
    }


@pytest.fixture(scope="session")
def kernels_file(kernels_folder: Path, kernels: dict[str, Library]) -> Path:
    """One of their files."""
    return min(kernels_folder.iterdir())
