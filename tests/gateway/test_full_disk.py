"""A full disk is one sentence with a path; /dev/full is a disk that is always full."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import create_engine

from gateway.commands.full_disk import writing_in
from gateway.errors import CommandError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("command", ["up", "gateway"])
def test_a_full_disk_at_start_is_one_sentence_with_the_path(command: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / f"{command}.pid").symlink_to("/dev/full")

    done = subprocess.run(
        [sys.executable, "-m", "gateway.commands", command, "--data-dir", str(tmp_path)],
        cwd=ROOT, env={**os.environ, "PORT": "0"}, capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert done.stderr == f"kvmeter: Cannot write {tmp_path}: No space left on device\n"
    assert done.returncode == 1


def test_a_disk_that_is_full_for_the_database_is_named_too(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'ledger'}")

    def fill() -> None:
        with writing_in(tmp_path), engine.begin() as conn:
            conn.exec_driver_sql("PRAGMA max_page_count = 1")
            conn.exec_driver_sql("CREATE TABLE t (a TEXT)")

    with pytest.raises(
        CommandError, match=f"^Cannot write in {tmp_path}: database or disk is full"
    ):
        fill()
    engine.dispose()


def test_other_errors_pass(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), writing_in(tmp_path):
        (tmp_path / "missing").read_text()
