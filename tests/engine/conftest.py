"""Fixtures of the engine's tests: the default model and a tiny one, each built once a run."""

import os
from pathlib import Path

import pytest
import torch

from engine.default_model import ensure_default_model
from engine.dtype import read_cpuinfo
from engine.native.library import Library, load_library
from tests.engine.tiny_model import write_tiny_model

torch.set_num_threads(1)
CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The default model, fetched and converted if this checkout has none yet."""
    models_dir = Path(os.environ.get("KVMETER_MODELS_DIR", CHECKOUT / "var" / "models"))
    return ensure_default_model(models_dir, lambda line: None)


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
