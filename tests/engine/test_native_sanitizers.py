"""A step in C touches no memory that is not its own, and does nothing undefined: `make soak`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SANITIZERS = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer"


def preloads() -> list[str]:
    """The compiler's sanitizer libraries; skips the test if it has none."""
    found = []
    for name in ("libasan.so", "libubsan.so"):
        command = ["cc", f"-print-file-name={name}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        path = done.stdout.strip()
        if done.returncode or not os.path.isabs(path):
            pytest.skip(f"NOT RUN: the C compiler brings no {name}")
        found.append(path)
    return found


@pytest.mark.parametrize("form", ["native", "portable"])
def test_a_step_touches_no_memory_but_its_own(form: str, soak: bool, tmp_path: Path) -> None:
    if not soak:
        pytest.skip("a long run: `make soak`")
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\nexec cc "$@" {SANITIZERS} -O1 -g\n')
    compiler.chmod(0o700)
    command = [sys.executable, "-m", "tests.engine.sanitized_steps", tmp_path, compiler, form]
    options = {
        "LD_PRELOAD": ":".join(preloads()),
        # Python leaves memory to the process's end; an allocator of its own would hide overruns.
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",
    }

    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | options, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr[-4_000:]
