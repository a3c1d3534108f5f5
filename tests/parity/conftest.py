"""Fixtures of the comparisons: the real default model, fetched and converted once a checkout."""

import os
from pathlib import Path

import pytest
import torch

from engine.model_files.default_model import ensure_default_model
from tests.engine.kernels import kernels, kernels_folder

__all__ = ("kernels", "kernels_folder", "smollm2_folder")

torch.set_num_threads(1)
CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The default model, fetched and converted if this checkout has none yet."""
    models_dir = Path(os.environ.get("KVMETER_MODELS_DIR", CHECKOUT / "var" / "models"))
    return ensure_default_model(models_dir, lambda line: None)
