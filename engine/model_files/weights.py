"""The safetensors of a model folder: every tensor used, none missing, none misshaped."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import ModelFileError
from engine.model_files.json_files import CURE
from engine.model_files.model_folder import MANIFEST, check_contents, file_digests

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class Weights:
    """The tensors of one folder, one file or several with an index.

    Raises ModelFileError if a file is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[Path, Any] = {}
        self._where: dict[str, Path] = {}
        for path in weight_files(folder):
            try:
                self._files[path] = safe_open(path, framework="pt")
            except FileNotFoundError as error:
                raise ModelFileError("Model file is missing", path, CURE) from error
            except (SafetensorError, OSError) as error:
                raise ModelFileError("Model file is damaged", path, CURE) from error
            self._where |= dict.fromkeys(self._files[path].keys(), path)
        # Old exports carry this computed buffer; it is no parameter.
        self._left = {name for name in self._where if not name.endswith(".rotary_emb.inv_freq")}

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor `name`, which must have `shape`; mark it as used."""
        if name not in self._where:
            raise ModelFileError(f"Tensor {name} is missing", self._folder, CURE)
        path = self._where[name]
        found = tuple(self._files[path].get_slice(name).get_shape())
        if found != shape:
            problem = f"Tensor {name} has shape {found} where config.json asks for {shape}"
            raise ModelFileError(problem, path, CURE)
        self._left.discard(name)
        tensor: torch.Tensor = self._files[path].get_tensor(name)
        if not tensor.is_floating_point():
            raise ModelFileError(f"Tensor {name} holds no floating-point numbers", path, CURE)
        return tensor

    def drop(self, name: str) -> None:
        """Leave the tensor out knowingly, if it is there."""
        self._left.discard(name)

    def require_all_taken(self) -> None:
        """Raise ModelFileError if a tensor was neither taken nor dropped."""
        if self._left:
            name = min(self._left)
            problem = f"{len(self._left)} tensors are unknown to this model, the first {name}"
            raise ModelFileError(problem, self._where[name], CURE)


def weight_files(folder: Path) -> list[Path]:
    """The folder's safetensors files, by the index if there is one. Opens none of them."""
    index = folder / INDEX
    if not index.is_file():
        return [folder / SINGLE]
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelFileError("Model file is damaged", index, CURE) from error
    return [folder / name for name in sorted(names)]


def checked_digest(folder: Path) -> str:
    """SHA-256 over config.json and every weight file: the model's identity for cached KV.

    The contents are read whole: sound, and of the order of the load itself (1.3 GB/s a core, shards
    side by side). If the folder has a manifest, its files are checked against it on the way.

    Raises ModelFileError if a file is missing or differs from the manifest.
    """
    paths = [folder / "config.json", *weight_files(folder)]
    for path in paths:
        if not path.is_file():
            raise ModelFileError("Model file is missing", path, CURE)
    digests = file_digests(paths)
    if (folder / MANIFEST).is_file():
        check_contents(folder, digests)
    lines = [f"{path.name} {digests[path]}\n" for path in paths]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
