"""The kernels as a shared library: compiled once with the machine's C compiler, then loaded.

The library lies in a folder that only its owner can write, under a name made from everything that
went into it, so a newer engine, compiler or processor makes its own. Engines that start at once
each compile for themselves and the last one's file stays; both are the same.
"""

import ctypes
import hashlib
import os
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from engine.compute.dtype import cpu_flags
from engine.errors import KernelsUnavailable

SOURCES = Path(__file__).parent
# Dot products of bfloat16: with them the kernels beat torch at every size, else not at all sizes.
NEEDED_FLAG = "avx512_bf16"
_FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fPIC", "-shared", "-fopenmp")
_COMPILE_SECONDS_MAX = 60


class Library:
    """The calls into the kernels. Structures are those of `engine.compute.native.llama`."""

    def __init__(self, path: Path) -> None:
        try:
            self._calls = ctypes.CDLL(os.fspath(path))
        except OSError as error:
            raise KernelsUnavailable(f"cannot load {path}: {error}") from error
        self._calls.kvmeter_scratch_bytes.restype = ctypes.c_int64
        self._calls.kvmeter_run.restype = None
        self.has_amx = bool(self._calls.kvmeter_open())

    def scratch_bytes(self, model: ctypes.Structure, batch: ctypes.Structure) -> int:
        """How much memory `run` needs beside what it is given."""
        size: int = self._calls.kvmeter_scratch_bytes(ctypes.byref(model), ctypes.byref(batch))
        return size

    def run(
        self, model: ctypes.Structure, batch: ctypes.Structure, scratch: int, *, num_threads: int
    ) -> None:
        """Compute one step; `scratch` is the address of that memory, aligned to 64 bytes."""
        self._calls.kvmeter_run(
            ctypes.byref(model), ctypes.byref(batch), ctypes.c_void_p(scratch), num_threads
        )


def require_processor(cpuinfo: str) -> None:
    """Raise KernelsUnavailable on a processor where the kernels are not worth it."""
    if NEEDED_FLAG not in cpu_flags(cpuinfo):
        raise KernelsUnavailable(f"the processor has no {NEEDED_FLAG}")


def load_library(
    folder: Path, *, cpuinfo: str, compiler: str = "cc", is_portable: bool = False
) -> Library:
    """Load the kernels from `folder`, compiled there first if they are not yet.

    `is_portable` leaves the processor's special instructions out, on any processor.
    Raises KernelsUnavailable.
    """
    flags = [*_FLAGS, *(["-DPORTABLE"] if is_portable else [])]
    openmp = _loaded_openmp()
    version = _run([compiler, "--version"])
    sources = [path.read_bytes() for path in sorted(SOURCES.glob("*.[ch]"))]
    ingredients = [*sources, version, *map(str.encode, [*flags, openmp])]
    ingredients.append(" ".join(sorted(cpu_flags(cpuinfo))).encode())
    digest = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in ingredients))
    path = folder / f"step-{digest.hexdigest()[:32]}.so"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _require_ours(folder)
        if not path.exists():
            _compile([compiler, *flags, os.fspath(SOURCES / "step.c"), openmp], path)
        _require_ours(path)
    except OSError as error:
        raise KernelsUnavailable(f"cannot use {folder}: {error.strerror}") from error
    return Library(path)


def _compile(command: Sequence[str], path: Path) -> None:
    """Run the compiler into a new file and then give that its name: whole, or not there."""
    descriptor, partial = tempfile.mkstemp(suffix=".so", prefix=".", dir=path.parent)
    os.close(descriptor)
    try:
        _run([*command, "-o", partial])
        os.chmod(partial, 0o700)  # whatever the umask: nobody else may write what we load
        os.replace(partial, path)
    finally:
        Path(partial).unlink(missing_ok=True)


def _run(command: Sequence[str]) -> bytes:
    try:
        done = subprocess.run(  # noqa: S603 - the compiler, with arguments of our own
            command, capture_output=True, timeout=_COMPILE_SECONDS_MAX, check=False
        )
    except FileNotFoundError as error:
        raise KernelsUnavailable(f"no C compiler: {command[0]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelsUnavailable(f"the C compiler does not run: {command[0]}") from error
    if done.returncode:
        complaint = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        raise KernelsUnavailable(f"the C compiler fails: {complaint[0][:200]}")
    return done.stdout


def _require_ours(path: Path) -> None:
    """Refuse what another user owns or could write: loading it would run their code."""
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise KernelsUnavailable(f"another user could have written {path}")


def _loaded_openmp() -> str:
    """The OpenMP library in this process, torch's: a second one would have threads of its own."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    except OSError:
        maps = ""
    for line in maps.splitlines():
        if "libgomp" in line:
            return line.split(maxsplit=5)[-1]
    raise KernelsUnavailable("torch brings no libgomp")
