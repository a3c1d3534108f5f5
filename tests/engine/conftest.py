"""Fixtures of the engine's tests, which need no network, no tokenizer and no package but its own.

What needs the default model or `transformers` is in tests/parity.
"""

from pathlib import Path

import pytest
import torch

from tests.engine.kernels import kernels, kernels_file, kernels_folder
from tests.engine.tiny_model import write_tiny_model

__all__ = ("kernels", "kernels_file", "kernels_folder", "tiny_folder")

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A seeded random Llama without tokenizer."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
