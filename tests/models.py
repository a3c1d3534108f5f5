"""The real default model's folder, for tests; fetched once, where `make run` keeps it too."""

from functools import cache
from pathlib import Path

from engine.model_files.default_model import ensure_default_model

MODELS_DIR = Path(__file__).parents[1] / "var" / "models"


@cache
def default_model_dir() -> Path:
    return ensure_default_model(MODELS_DIR, progress=lambda line: None)
