"""The kernels as a shared library: compiled once with the machine's C compiler, then loaded.

The library lies in a folder that only its owner can write, under a name made from everything that
went into it, so a newer engine, compiler or processor makes its own. Engines that start at once
each compile for themselves and the last one's file stays; both are the same. Its last bytes are a
digest of the others: a file that was cut short would end the process that loads it.
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
_SAID_BYTES_MAX = 65_536


class Library:
    """The calls into the kernels. Structures are those of `engine.compute.native.structures`."""

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
    """Raise KernelsUnavailable on a processor where the kernels are not worth it."""
    if NEEDED_FLAG not in cpu_flags(cpuinfo):
        raise KernelsUnavailable(f"the processor has no {NEEDED_FLAG}")


def load_library(
    folder: Path, *, cpuinfo: str, compiler: str = "cc", form: Form = "native"
) -> Library:
    """Load the kernels from `folder`, compiled there first if they are not yet.

    Other forms than "native" leave special instructions out, on any processor: for the tests.
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
        _require_ours(folder)
        if not _is_whole(path):
            _compile([compiler, *flags, os.fspath(SOURCES / "step.c"), openmp], path)
        _require_ours(path)
        try:
            return Library(path)
        except KernelsUnavailable:
            path.unlink()  # the next start may have better luck
            raise
    except OSError as error:
        raise KernelsUnavailable(f"cannot use {folder}: {error.strerror}") from error


def loaded_openmp(maps: Path = Path("/proc/self/maps")) -> str:
    """The OpenMP library in this process, torch's: a second one would have threads of its own.

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
    """Run the compiler into a new file and then give that its name: whole, or not there."""
    descriptor, partial = tempfile.mkstemp(suffix=".so", prefix=".", dir=path.parent)
    os.close(descriptor)
    try:
        _run([*command, "-o", partial], seconds_max=_COMPILE_SECONDS_MAX)
        os.chmod(partial, 0o700)  # whatever the umask: nobody else may write what we load
        with open(partial, "r+b") as file:
            file.write(hashlib.sha256(file.read()).digest())
        os.replace(partial, path)
    finally:
        Path(partial).unlink(missing_ok=True)


def _is_whole(path: Path) -> bool:
    """Whether the file is there as `_compile` left it."""
    if not path.exists():
        return False
    _require_ours(path)
    content = path.read_bytes()
    return hashlib.sha256(content[:-32]).digest() == content[-32:]


def _run(command: Sequence[str], *, seconds_max: float) -> bytes:
    """What a command says, up to a limit; it ends within the time, and its children with it."""
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
    timer = threading.Timer(seconds_max, _end_late, [process, late])
    timer.start()
    assert process.stdout is not None, "it was started with a pipe"
    try:
        said = process.stdout.read(_SAID_BYTES_MAX)
        process.stdout.close()  # one that says more is ended by it
        code = process.wait()
    finally:
        timer.cancel()
        if process.returncode is None:
            _end(process)
    if late.is_set():
        raise KernelsUnavailable(f"the C compiler takes more than {seconds_max} s: {command[0]}")
    if code:
        raise KernelsUnavailable(f"the C compiler fails: {_complaint(said)}")
    return said


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill it and all that it started: `cc` may have ended, and a child of it hold our pipe."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _end_late(process: subprocess.Popen[bytes], late: threading.Event) -> None:
    late.set()
    _end(process)


def _complaint(said: bytes) -> str:
    """The first error in what a compiler said; an operator's terminal and log take plain text."""
    lines = said.decode("ascii", errors="backslashreplace").strip().splitlines() or ["no message"]
    first = next((line for line in lines if "error:" in line), lines[0])
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in first)[:200]


def _require_ours(path: Path) -> None:
    """Refuse what another user owns or could write: loading it would run their code."""
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise KernelsUnavailable(f"another user could have written {path}")
