"""Loads a model folder: the model, its stop tokens and its default sampling."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.compute.backend import Backend, build_backend
from engine.compute.native.library import Library
from engine.errors import ModelFileError
from engine.model_files.json_files import CURE, read_json
from engine.model_files.weights import Weights, checked_digest
from engine.models.registry import find_architecture
from engine.protocol import Sampling


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, and the facts of its folder that the engine reports to clients."""

    backend: Backend
    weights_digest: str
    stop_token_ids: tuple[int, ...]
    default_sampling: Sampling


def load_model(
    folder: Path, *, dtype: torch.dtype, device: torch.device, library: Library | None = None
) -> LoadedModel:
    """Load a Hugging Face folder; with `library` it runs in C, on the CPU in bfloat16.

    Raises ModelFileError naming the file that is missing, damaged or does not fit config.json, and
    UnsupportedModel if the folder describes another kind of model.
    """
    architecture, config = find_architecture(folder)
    digest = checked_digest(folder)
    weights = Weights(folder)
    backend = build_backend(
        architecture, config, weights, dtype=dtype, device=device, library=library
    )
    weights.require_all_taken()
    path = folder / "generation_config.json"
    generation = read_json(path) if path.is_file() else {}
    try:
        return LoadedModel(
            backend=backend,
            weights_digest=digest,
            stop_token_ids=_stop_token_ids(generation, read_json(folder / "config.json")),
            default_sampling=_default_sampling(generation),
        )
    except (TypeError, ValueError) as error:
        raise ModelFileError("Model file is damaged", path, CURE) from error


def _stop_token_ids(generation: dict[str, Any], config: dict[str, Any]) -> tuple[int, ...]:
    """Return the end-of-sequence ids of generation_config.json, or else of config.json."""
    found = generation.get("eos_token_id", config.get("eos_token_id"))
    if found is None:
        return ()
    return tuple(int(token) for token in (found if isinstance(found, list) else [found]))


def _default_sampling(generation: dict[str, Any]) -> Sampling:
    """Return the sampling that the file states; only `do_sample: false` makes a model greedy."""
    if generation.get("do_sample") is False:
        return Sampling(temperature=0.0)
    stated = {name: value for name, value in generation.items() if value is not None}
    plain = Sampling()
    return Sampling(
        temperature=float(stated.get("temperature", plain.temperature)),
        top_p=float(stated.get("top_p", plain.top_p)),
        top_k=int(stated.get("top_k", plain.top_k)),
    )
