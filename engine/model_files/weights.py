"""The safetensors of a model folder; checks that every tensor is used and has its shape."""

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
ALIGNMENT_BYTES = 64  # of what torch allocates: a cache line, an AVX-512 register


class Weights:
    """The tensors of one folder: one file, or several with an index.

    Raises ModelFileError if a file is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[Path, Any] = {}
        self._path_of: dict[str, Path] = {}
        for path in weight_files(folder):
            try:
                self._files[path] = safe_open(path, framework="pt")
            except FileNotFoundError as error:
                raise ModelFileError("Model file is missing", path, CURE) from error
            except (SafetensorError, OSError) as error:
                raise ModelFileError("Model file is damaged", path, CURE) from error
            self._path_of |= dict.fromkeys(self._files[path].keys(), path)
        # Old exports store this computed buffer; it is no parameter.
        self._unused = {name for name in self._path_of if not name.endswith(".rotary_emb.inv_freq")}

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the tensor `name`, which must have `shape`, and mark it as used."""
        if name not in self._path_of:
            raise ModelFileError(f"Tensor {name} is missing", self._folder, CURE)
        path = self._path_of[name]
        found = tuple(self._files[path].get_slice(name).get_shape())
        if found != shape:
            problem = f"Tensor {name} has shape {found} where config.json asks for {shape}"
            raise ModelFileError(problem, path, CURE)
        self._unused.discard(name)
        tensor: torch.Tensor = self._files[path].get_tensor(name)
        if not tensor.is_floating_point():
            raise ModelFileError(f"Tensor {name} holds no floating-point numbers", path, CURE)
        # A tensor lies in the mapped file where its header ends. On some processors a product of
        # unaligned operands is rounded otherwise: one model must not depend on its files' layout.
        return tensor if tensor.data_ptr() % ALIGNMENT_BYTES == 0 else tensor.clone()

    def drop(self, name: str) -> None:
        """Mark the tensor as left out on purpose, if it exists."""
        self._unused.discard(name)

    def require_all_taken(self) -> None:
        """Raise ModelFileError if a tensor was neither taken nor dropped."""
        if self._unused:
            name = min(self._unused)
            problem = f"{len(self._unused)} tensors are unknown to this model, the first {name}"
            raise ModelFileError(problem, self._path_of[name], CURE)


def weight_files(folder: Path) -> list[Path]:
    """Return the folder's safetensors files, from the index if there is one; open none."""
    index = folder / INDEX
    if not index.is_file():
        return [folder / SINGLE]
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelFileError("Model file is damaged", index, CURE) from error
    return [folder / name for name in sorted(names)]


def checked_digest(folder: Path) -> str:
    """Return a SHA-256 over config.json and all weight files: the identity of the model's KV.

    All contents are read, which takes about as long as loading them (1.3 GB/s a core, shards in
    parallel). If the folder has a manifest, the files are also checked against it.

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
