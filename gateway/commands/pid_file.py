"""`DATA_DIR/run/NAME.pid`: the process ids, for operators and their tools."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def pid_file(data_dir: Path, name: str) -> Iterator[None]:
    """Keep this process's pid in its file; a killed process leaves the file behind."""
    path = data_dir / "run" / f"{name}.pid"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.write_text(f"{os.getpid()}\n", encoding="ascii")
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
