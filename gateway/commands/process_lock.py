"""One process of each kind a data folder: a lock that dies with its holder, and its pid file."""

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gateway.errors import CommandError


@contextmanager
def only_process(data_dir: Path, name: str) -> Iterator[None]:
    """Hold `DATA_DIR/run/NAME.lock` and keep the pid in `NAME.pid` while the block runs.

    The kernel releases the lock of a killed process; its pid file stays. Raises CommandError if
    another process holds the lock.
    """
    folder = data_dir / "run"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (folder / f"{name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CommandError(f"Another kvmeter {name} is using {data_dir}") from None
        pid_file = folder / f"{name}.pid"
        pid_file.write_text(f"{os.getpid()}\n", encoding="ascii")
        try:
            yield
        finally:
            pid_file.unlink(missing_ok=True)


def instance_id(data_dir: Path) -> str:
    """Return the id of the data folder, made at its first use; the caller holds its lock."""
    path = data_dir / "run" / "instance-id"
    if not path.exists():
        draft = path.with_suffix(".draft")
        draft.write_text(f"inst_{secrets.token_hex(16)}", encoding="ascii")
        draft.rename(path)
    return path.read_text(encoding="ascii")
