"""The table of architectures: the classes for each Hugging Face `model_type`."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ModelFileError, UnsupportedModel
from engine.model_files.json_files import CURE, read_json
from engine.model_files.weights import Weights
from engine.models.llama import Llama
from engine.models.llama_config import LlamaConfig
from engine.models.model import Model, ModelConfig, Ops


@dataclass(frozen=True, slots=True)
class Architecture:
    """One family of models: `model` is built from a `config`, the weights and a backend's ops."""

    config: type[ModelConfig]
    model: Callable[[Any, Weights, Ops], Model]


ARCHITECTURES = {"llama": Architecture(LlamaConfig, Llama)}


def find_architecture(folder: Path) -> tuple[Architecture, ModelConfig]:
    """Return the architecture that `folder`/config.json names, and its config.

    Raises ModelFileError if the file is missing or damaged, UnsupportedModel if it describes
    something that this engine does not compute.
    """
    path = folder / "config.json"
    raw = read_json(path)
    model_type = raw.get("model_type")
    if model_type not in ARCHITECTURES:
        known = " or ".join(map(repr, ARCHITECTURES))
        raise UnsupportedModel(path, f"model_type is {model_type!r}, not {known}")
    architecture = ARCHITECTURES[model_type]
    try:
        return architecture, architecture.config.from_json(raw, path)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelFileError("Model config is damaged", path, CURE) from error
