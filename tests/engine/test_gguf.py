"""The GGUF reader on a small file built by hand, and on files that are none."""

import struct
from pathlib import Path

import numpy as np
import pytest

from engine.errors import ModelFileError
from engine.model_files.gguf import GGUFFile

F32, F16, Q4_1, Q8_0 = 0, 1, 3, 8


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def entry(key: str, kind: int, payload: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + payload


def tensor(name: str, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    shape = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return text(name) + shape + struct.pack("<IQ", kind, offset)


def gguf(entries: list[bytes], tensors: list[bytes], data: bytes, version: int = 3) -> bytes:
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(entries))
    header += b"".join(entries) + b"".join(tensors)
    return header.ljust(-(-len(header) // 32) * 32, b"\0") + data


Q4_BLOCK = struct.pack("<ee", 0.5, -2.0) + bytes(i | (15 - i) << 4 for i in range(16))
Q8_BLOCK = struct.pack("<e", 0.25) + bytes(range(32))
F32_DATA = np.arange(6, dtype="<f4").tobytes().ljust(32, b"\0")
SMALL = gguf(
    [
        entry("name", 8, text("größe")),
        entry("count", 4, struct.pack("<I", 7)),
        entry("ratio", 6, struct.pack("<f", 0.5)),
        entry("flag", 7, b"\1"),
        entry("numbers", 9, struct.pack("<IQ3i", 5, 3, -1, 0, 1)),
        entry("words", 9, struct.pack("<IQ", 8, 2) + text("a") + text("b c")),
    ],
    [
        tensor("plain", (3, 2), F32, 0),
        tensor("quarter", (32, 1), Q4_1, 32),
        tensor("half", (32, 1), Q8_0, 64),
    ],
    F32_DATA + Q4_BLOCK.ljust(32, b"\0") + Q8_BLOCK,
)


@pytest.fixture
def write(tmp_path: Path):
    def write_file(contents: bytes) -> Path:
        path = tmp_path / "model.gguf"
        path.write_bytes(contents)
        return path

    return write_file


def test_metadata_of_every_type_is_read(write) -> None:
    assert GGUFFile(write(SMALL)).metadata == {
        "name": "größe",
        "count": 7,
        "ratio": 0.5,
        "flag": True,
        "numbers": [-1, 0, 1],
        "words": ["a", "b c"],
    }


def test_tensors_are_dequantised_row_major(write) -> None:
    file = GGUFFile(write(SMALL))

    assert file.read("plain").tolist() == [[0, 1, 2], [3, 4, 5]]
    quants = [*range(16), *(15 - i for i in range(16))]
    assert file.read("quarter").tolist() == [[0.5 * q - 2.0 for q in quants]]
    assert file.read("half").tolist() == [[0.25 * q for q in range(32)]]


@pytest.mark.parametrize("length", range(0, len(SMALL), 7))
def test_a_truncated_file_is_refused_wherever_it_ends(write, length: int) -> None:
    with pytest.raises(ModelFileError, match=r"model\.gguf; fetch the file again"):
        GGUFFile(write(SMALL[:length]))


@pytest.mark.parametrize(
    ("contents", "problem"),
    [
        (b"PK\3\4 a zip file, say", "Not a GGUF file"),
        (gguf([], [], b"", version=9), "GGUF version 9 is not supported"),
        (gguf([], [tensor("t", (4,), F16, 0)], bytes(32)), "GGUF tensor kind 1 is not supported"),
        (gguf([], [tensor("t", (31,), Q8_0, 0)], bytes(64)), "GGUF header is damaged"),
        (gguf([entry("k", 99, b"")], [], b""), "GGUF header is damaged"),
        (gguf([entry("k", 8, struct.pack("<Q", 2) + b"\xff\xfe")], [], b""), "header is damaged"),
        (gguf([text("k") + struct.pack("<IIQ", 9, 4, 2**60)], [], b""), "GGUF file is truncated"),
    ],
)
def test_a_foreign_or_damaged_file_is_refused(write, contents: bytes, problem: str) -> None:
    with pytest.raises(ModelFileError, match=problem):
        GGUFFile(write(contents))
