"""The journal's log files: append-only JSON lines with a CRC each, numbered in one folder.

A line is the CRC-32 of its JSON text as eight hex digits, a space, the text, a newline. A line that
a crash or a power cut left incomplete fails its CRC and is skipped.
"""

import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.errors import JournalError

_CHECK_CHARS = 9  # eight hex digits and a space


class Segment:
    """A file that lines are appended to: collected first, then written with one call."""

    def __init__(self, folder: Path, kind: str, number: int) -> None:
        """Create the file. Raises JournalError."""
        self.kind = kind
        self.number = number
        self.path = path = segment_path(folder, kind, number)
        self._pending: list[bytes] = []
        self._size = 0
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
            self._fd = os.open(path, flags, 0o600)
        except OSError as error:
            raise _failed("create", path, error) from error

    @property
    def size(self) -> int:
        """Bytes in the file, collected lines included."""
        return self._size

    def append(self, data: Any) -> int:
        """Collect a line and return the offset at which it begins."""
        offset = self._size
        text = json.dumps(data, separators=(",", ":")).encode()
        line = b"%08x %b\n" % (zlib.crc32(text), text)
        self._pending.append(line)
        self._size += len(line)
        return offset

    def write(self) -> bool:
        """Write all collected lines; they survive this process from here on.

        Returns whether there were any. Raises JournalError.
        """
        if not self._pending:
            return False
        data = memoryview(b"".join(self._pending))
        self._pending.clear()
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            raise _failed("write", self.path, error) from error
        return True

    def sync(self) -> None:
        """Sync the file, so that what was written survives a power cut. Raises JournalError."""
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise _failed("sync", self.path, error) from error

    def close(self) -> None:
        """Close the file for good."""
        os.close(self._fd)


def segment_path(folder: Path, kind: str, number: int) -> Path:
    """Return the path of segment `number`."""
    return folder / f"{kind}-{number:08d}.log"


def segment_numbers(folder: Path, kind: str) -> list[int]:
    """Return the numbers of all segments of a kind, ascending."""
    return sorted(int(path.stem.rpartition("-")[2]) for path in folder.glob(f"{kind}-*.log"))


def read_segment(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the offset and the data of every line whose CRC holds. Raises JournalError."""
    offset = 0
    try:
        with path.open("rb") as file:
            for line in file:
                if (data := _checked(line)) is not None:
                    yield offset, data
                offset += len(line)
    except OSError as error:
        raise _failed("read", path, error) from error


def read_line(path: Path, offset: int) -> Any:
    """Return the data of the line at `offset`. Raises JournalError if its CRC fails."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = _checked(file.readline())
    except OSError as error:
        raise _failed("read", path, error) from error
    if data is None:
        raise JournalError(f"Damaged journal line at byte {offset}: {path}")
    return data


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that files created or removed in it stay so after a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _checked(line: bytes) -> Any | None:
    text = line[_CHECK_CHARS:-1]
    if not line.endswith(b"\n") or line[:_CHECK_CHARS] != b"%08x " % zlib.crc32(text):
        return None
    return json.loads(text)


def _failed(verb: str, path: Path, error: OSError) -> JournalError:
    return JournalError(f"Cannot {verb} the journal {path}: {error.strerror}.")
