"""Model folders that kvmeter makes: complete or absent, with a manifest to check them by.

A folder is built under a temporary name, gets a manifest of every file's size and SHA-256 last, and
is renamed. Loading checks the manifest, and so finds files that were damaged or removed since.
"""

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from engine.errors import ModelFileError

MANIFEST = "kvmeter-manifest.json"
CURE = "delete the folder and run `kvmeter models fetch`"


def ensure_folder(folder: Path, build: Callable[[Path], None]) -> None:
    """Call `build` to fill the folder if it does not exist; check that it is complete.

    `build` gets an empty folder beside the final one, which is removed if it raises. Safe for
    several processes at once: one builds, the others wait and use its folder.

    Raises ModelFileError if the folder exists but a file is missing or has another length.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial_prefix = f".{folder.name}.partial-"
    with _lock(folder.parent / f".{folder.name}.lock"):
        if not folder.exists():
            for leftover in folder.parent.glob(f"{partial_prefix}*"):  # of a killed process
                shutil.rmtree(leftover)
            with tempfile.TemporaryDirectory(prefix=partial_prefix, dir=folder.parent) as partial:
                built = Path(partial) / folder.name
                built.mkdir()
                build(built)
                write_manifest(built)
                _sync(built)
                built.rename(folder)
    check_sizes(folder)


def write_manifest(folder: Path) -> None:
    """Record every file now in `folder`."""
    names = sorted(path.name for path in folder.iterdir())
    digests = file_digests(folder / name for name in names)
    files = {
        name: {"bytes": (folder / name).stat().st_size, "sha256": digests[folder / name]}
        for name in names
    }
    (folder / MANIFEST).write_text(json.dumps({"files": files}, indent=1) + "\n", encoding="utf-8")


def check_sizes(folder: Path) -> None:
    """Check that every file of the manifest exists with its length; read no contents.

    Raises ModelFileError naming the first file that is not, or the manifest if it is missing.
    """
    for path, size_bytes, _ in _entries(folder):
        if not path.is_file():
            raise ModelFileError("Model file is missing", path, CURE)
        if path.stat().st_size != size_bytes:
            raise ModelFileError("Model file is damaged", path, CURE)


def check_contents(folder: Path, digests: dict[Path, str] | None = None) -> None:
    """Check every file of the manifest against its SHA-256; `digests` are already known.

    Raises ModelFileError naming the first file that differs.
    """
    check_sizes(folder)
    known = digests or {}
    entries = _entries(folder)
    known = known | file_digests(path for path, _, _ in entries if path not in known)
    for path, _, sha256 in entries:
        if known[path] != sha256:
            raise ModelFileError("Model file is damaged", path, CURE)


def file_digests(paths: Iterable[Path]) -> dict[Path, str]:
    """Return the SHA-256 of each file in hexadecimal; hash the files in parallel."""
    wanted = list(paths)
    with ThreadPoolExecutor() as pool:  # hashing releases the interpreter lock
        return dict(zip(wanted, pool.map(_sha256, wanted), strict=True))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _entries(folder: Path) -> list[tuple[Path, int, str]]:
    path = folder / MANIFEST
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["files"]
        return [(folder / name, entry["bytes"], entry["sha256"]) for name, entry in files.items()]
    except FileNotFoundError as error:
        raise ModelFileError("Model folder is incomplete", path, CURE) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelFileError("Model file is damaged", path, CURE) from error


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold the file's lock; the operating system releases it if this process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sync(folder: Path) -> None:
    """Sync the files to disk before the rename makes them visible."""
    for path in (*folder.iterdir(), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
