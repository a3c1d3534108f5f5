"""A reader for GGUF model files: metadata, and tensors as float32 arrays.

It reads the three tensor kinds of the default model's file. Layout and block formats follow the
GGUF specification, version 3; what is read here is the same in version 2.
"""

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import ModelFileError

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
QUANT_BLOCK = 32  # values that share one scale in Q8_0 and Q4_1
CURE = "fetch the file again"


def _from_f32(data: np.ndarray) -> np.ndarray:
    return data.view("<f4")


def _from_q8_0(data: np.ndarray) -> np.ndarray:
    """Each block: scale f16, then 32 int8; value = scale x q."""
    blocks = data.reshape(-1, 2 + QUANT_BLOCK)
    scale = blocks[:, :2].view("<f2").astype(np.float32)
    return scale * blocks[:, 2:].view(np.int8).astype(np.float32)


def _from_q4_1(data: np.ndarray) -> np.ndarray:
    """Each block: scale f16, minimum f16, 16 bytes; value = scale x q + minimum.

    Byte i holds value i in its low half and value i + 16 in its high half.
    """
    blocks = data.reshape(-1, 4 + QUANT_BLOCK // 2)
    scale = blocks[:, :2].view("<f2").astype(np.float32)
    minimum = blocks[:, 2:4].view("<f2").astype(np.float32)
    packed = blocks[:, 4:]
    quants = np.concatenate([packed & 0x0F, packed >> 4], axis=1)
    return scale * quants.astype(np.float32) + minimum


@dataclass(frozen=True, slots=True)
class _Kind:
    """How one tensor kind is stored: `block_bytes` for each `block_values` values."""

    block_values: int
    block_bytes: int
    dequantize: Callable[[np.ndarray], np.ndarray]


_KINDS = {
    0: _Kind(1, 4, _from_f32),
    3: _Kind(QUANT_BLOCK, 4 + QUANT_BLOCK // 2, _from_q4_1),
    8: _Kind(QUANT_BLOCK, 2 + QUANT_BLOCK, _from_q8_0),
}

# struct codes of the scalar metadata types; 8 is a string, 9 an array.
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """The place of one tensor. `shape` is row-major: the contiguous dimension comes last."""

    shape: tuple[int, ...]
    kind: int
    offset_bytes: int
    size_bytes: int


class GGUFFile:
    """One open GGUF file: `metadata` by key, `tensors` by name, values on demand.

    Raises ModelFileError if the file is truncated, is no GGUF, or holds an unsupported tensor kind.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            if not file.read(1):
                raise self._error("GGUF file is empty")
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._position = 0
        try:
            self.metadata, self.tensors = self._read_header()
        except (struct.error, UnicodeDecodeError, KeyError) as error:
            raise self._error("GGUF header is damaged") from error
        for tensor in self.tensors.values():
            if tensor.offset_bytes + tensor.size_bytes > len(self._data):
                raise self._error("GGUF file is truncated")

    def read(self, name: str) -> np.ndarray:
        """Return the tensor's values as a new float32 array of its shape."""
        tensor = self.tensors[name]
        raw = np.frombuffer(self._data, np.uint8, tensor.size_bytes, tensor.offset_bytes)
        return _KINDS[tensor.kind].dequantize(raw).reshape(tensor.shape).astype(np.float32)

    def _read_header(self) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        if self._data[:4] != MAGIC:
            raise self._error("Not a GGUF file")
        self._position = 4
        version, num_tensors, num_entries = self._unpack("<IQQ")
        if version not in (2, 3):
            raise self._error(f"GGUF version {version} is not supported")
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self._string()
            metadata[key] = self._value(self._unpack("<I")[0])

        headers = [self._tensor_header() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        data_start = -(-self._position // alignment) * alignment
        tensors = {
            name: self._place(shape, kind, data_start + offset)
            for name, shape, kind, offset in headers
        }
        return metadata, tensors

    def _tensor_header(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (num_dims,) = self._unpack("<I")
        dims = self._unpack(f"<{num_dims}Q")
        kind, offset = self._unpack("<IQ")
        return name, tuple(reversed(dims)), kind, offset

    def _place(self, shape: tuple[int, ...], kind: int, offset_bytes: int) -> GGUFTensor:
        if kind not in _KINDS:
            raise self._error(f"GGUF tensor kind {kind} is not supported")
        stored = _KINDS[kind]
        num_blocks, rest = divmod(int(np.prod(shape, dtype=np.int64)), stored.block_values)
        if rest:
            raise self._error("GGUF header is damaged")
        return GGUFTensor(shape, kind, offset_bytes, num_blocks * stored.block_bytes)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item_kind, length = self._unpack("<IQ")
            if item_kind in _SCALARS:
                return list(self._unpack(f"<{length}{_SCALARS[item_kind]}"))
            return [self._value(item_kind) for _ in range(length)]
        return self._unpack(f"<{_SCALARS[kind]}")[0]

    def _string(self) -> str:
        (length,) = self._unpack("<Q")
        start, self._position = self._position, self._position + length
        if self._position > len(self._data):
            raise self._error("GGUF file is truncated")
        return self._data[start : self._position].decode()

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        size = struct.calcsize(layout)
        if self._position + size > len(self._data):
            raise self._error("GGUF file is truncated")
        values = struct.unpack_from(layout, self._data, self._position)
        self._position += size
        return values

    def _error(self, problem: str) -> ModelFileError:
        return ModelFileError(problem, self.path, CURE)
