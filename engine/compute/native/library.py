"""The kernels as a shared library: compiled once with the machine's C compiler, then loaded.

The library is kept in a folder that only its owner can write. Its name is a digest of the sources,
the compiler, the flags and the processor, so that a change of any of them makes a new file. Engines
that start at the same time each compile it; the files are equal and the last one stays. A file ends
with a digest of its other bytes: loading a truncated library would end the process.
"""

import ctypes
import hashlib
import itertools
import os
import signal
import stat
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from engine.compute.dtype import cpu_flags
from engine.compute.native.structures import FieldStruct, layout
from engine.errors import KernelsUnavailable

SOURCES = Path(__file__).parent
# Dot products of bfloat16: without them the engine computes in float32, which is torch's.
NEEDED_FLAG = "avx512_bf16"
_FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fPIC", "-shared", "-fopenmp")
Form = Literal["native", "without tiles", "portable"]
_FORMS = {"native": (), "without tiles": ("-DWITHOUT_TILES",), "portable": ("-DPORTABLE",)}
_COMPILE_SECONDS_MAX = 60
_VERSION_SECONDS_MAX = 10
_OUTPUT_BYTES_MAX = 65_536


class Library:
    """The calls into the kernels, with the structures of `engine.compute.native.structures`."""

    def __init__(self, path: Path) -> None:
        try:
            self._calls = ctypes.CDLL(os.fspath(path))
            self._calls.kvmeter_scratch_bytes.restype = ctypes.c_int64
            self._calls.kvmeter_run.restype = None
            self._calls.kvmeter_layout.restype = ctypes.POINTER(FieldStruct)
            self.has_amx = bool(self._calls.kvmeter_open())
        except (OSError, AttributeError) as error:  # no library, or one without our calls
            raise KernelsUnavailable(f"cannot load {path}: {error}") from error
        _require_layout(self._calls.kvmeter_layout(), path)

    def scratch_bytes(self, model: ctypes.Structure, batch: ctypes.Structure) -> int:
        """Return the bytes of scratch memory that `run` needs for this batch."""
        size: int = self._calls.kvmeter_scratch_bytes(ctypes.byref(model), ctypes.byref(batch))
        return size

    def run(
        self, model: ctypes.Structure, batch: ctypes.Structure, scratch: int, *, num_threads: int
    ) -> None:
        """Compute one step; `scratch` is the address of that memory, aligned to 64 bytes."""
        self._calls.kvmeter_run(
            ctypes.byref(model), ctypes.byref(batch), ctypes.c_void_p(scratch), num_threads
        )


def _require_layout(fields: "ctypes._Pointer[FieldStruct]", path: Path) -> None:
    """Raise KernelsUnavailable if C and Python lay out a shared structure differently."""
    exported = map(fields.__getitem__, itertools.count())
    named = itertools.takewhile(lambda field: field.name is not None, exported)
    compiled = {field.name.decode(): (field.offset, field.size) for field in named}
    ours = layout()
    for name in [*ours, *compiled]:
        if compiled.get(name) != ours.get(name):
            raise KernelsUnavailable(
                f"cannot load {path}: {name} has offset and size {compiled.get(name)} in C and "
                f"{ours.get(name)} in Python"
            )


def require_processor(cpuinfo: str) -> None:
    """Raise KernelsUnavailable on a processor where torch is the better choice."""
    if NEEDED_FLAG not in cpu_flags(cpuinfo):
        raise KernelsUnavailable(f"the processor has no {NEEDED_FLAG}")


def load_library(
    folder: Path, *, cpuinfo: str, compiler: str = "cc", form: Form = "native"
) -> Library:
    """Load the kernels from `folder`; compile them first if they are not there.

    The tests use the forms other than "native", which leave special instructions out.
    Raises KernelsUnavailable.
    """
    flags = [*_FLAGS, *_FORMS[form]]
    if form != "portable" and NEEDED_FLAG in cpu_flags(cpuinfo):
        flags.append("-DEXPECTS_BF16")
    openmp = loaded_openmp()
    version = _run([compiler, "--version"], seconds_max=_VERSION_SECONDS_MAX)
    sources = [path.read_bytes() for path in sorted(SOURCES.glob("*.[ch]"))]
    ingredients = [*sources, version, *map(os.fsencode, [*flags, openmp])]
    ingredients.append(" ".join(sorted(cpu_flags(cpuinfo))).encode())
    digest = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in ingredients))
    path = folder / f"step-{digest.hexdigest()[:32]}.so"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _require_owned(folder)
        if not _is_whole(path):
            _compile([compiler, *flags, os.fspath(SOURCES / "step.c"), openmp], path)
        _require_owned(path)
        try:
            return Library(path)
        except KernelsUnavailable:
            path.unlink()  # the next start compiles it again
            raise
    except OSError as error:
        raise KernelsUnavailable(f"cannot use {folder}: {error.strerror}") from error


def loaded_openmp(maps: Path = Path("/proc/self/maps")) -> str:
    """Return the path of torch's OpenMP library: a second one would have its own threads.

    Raises KernelsUnavailable.
    """
    try:
        lines = os.fsdecode(maps.read_bytes()).splitlines()
    except OSError:
        lines = []
    for line in lines:
        path = line.split(maxsplit=5)[-1]
        if Path(path).name.startswith("libgomp"):
            return path
    raise KernelsUnavailable("torch brings no libgomp")


def _compile(command: Sequence[str], path: Path) -> None:
    """Compile into a temporary file and rename it, so that `path` is never incomplete."""
    descriptor, partial = tempfile.mkstemp(suffix=".so", prefix=".", dir=path.parent)
    os.close(descriptor)
    try:
        _run([*command, "-o", partial], seconds_max=_COMPILE_SECONDS_MAX)
        os.chmod(partial, 0o700)  # whatever the umask: no other user may write a file that we load
        with open(partial, "r+b") as file:
            file.write(hashlib.sha256(file.read()).digest())
        os.replace(partial, path)
    finally:
        Path(partial).unlink(missing_ok=True)


def _is_whole(path: Path) -> bool:
    """Return whether the file exists and is complete."""
    if not path.exists():
        return False
    _require_owned(path)
    content = path.read_bytes()
    return hashlib.sha256(content[:-32]).digest() == content[-32:]


def _run(command: Sequence[str], *, seconds_max: float) -> bytes:
    """Run a command and return its output, up to a limit; kill it and its children when late."""
    try:
        process = subprocess.Popen(  # noqa: S603 - the compiler, with arguments of our own
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except FileNotFoundError as error:
        raise KernelsUnavailable(f"no C compiler: {command[0]}") from error
    except OSError as error:
        raise KernelsUnavailable(f"the C compiler does not run: {command[0]}") from error
    late = threading.Event()
    timer = threading.Timer(seconds_max, _kill_late, [process, late])
    timer.start()
    assert process.stdout is not None, "it was started with a pipe"
    try:
        output = process.stdout.read(_OUTPUT_BYTES_MAX)
        process.stdout.close()  # one that says more is ended by it
        code = process.wait()
    finally:
        timer.cancel()
        if process.returncode is None:
            _kill(process)
    if late.is_set():
        raise KernelsUnavailable(f"the C compiler takes more than {seconds_max} s: {command[0]}")
    if code:
        raise KernelsUnavailable(f"the C compiler fails: {_first_error(output)}")
    return output


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the process group: `cc` may have ended while a child of it holds our pipe."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _kill_late(process: subprocess.Popen[bytes], late: threading.Event) -> None:
    late.set()
    _kill(process)


def _first_error(output: bytes) -> str:
    """Return the first error in a compiler's output, as printable ASCII for terminal and log."""
    lines = output.decode("ascii", errors="backslashreplace").strip().splitlines() or ["no message"]
    first = next((line for line in lines if "error:" in line), lines[0])
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in first)[:200]


def _require_owned(path: Path) -> None:
    """Raise if another user owns or could write the file: loading it would run their code."""
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise KernelsUnavailable(f"another user could have written {path}")
