"""One process of each kind a data folder."""

import os
from pathlib import Path

import pytest

from gateway.commands.process_lock import instance_id, only_process
from gateway.errors import CommandError


def test_a_second_process_of_the_kind_is_refused_and_touches_nothing(tmp_path: Path):
    with only_process(tmp_path, "gateway"):
        pid_file = tmp_path / "run" / "gateway.pid"
        before = pid_file.read_text()

        with (
            pytest.raises(CommandError, match="Another kvmeter gateway is using"),
            only_process(tmp_path, "gateway"),
        ):
            pass

        assert pid_file.read_text() == before == f"{os.getpid()}\n"
    assert not pid_file.exists()


def test_the_lock_of_a_process_that_ended_is_free(tmp_path: Path):
    for _ in range(2):
        with only_process(tmp_path, "gateway"), only_process(tmp_path, "up"):
            pass


def test_a_data_folder_is_one_instance_for_ever(tmp_path: Path):
    with only_process(tmp_path, "gateway"):
        assert instance_id(tmp_path) == instance_id(tmp_path)
    with only_process(tmp_path / "other", "gateway"):
        assert instance_id(tmp_path / "other") != instance_id(tmp_path)
