"""Model folders are whole or not there, and damage is found."""

import json
import threading
from pathlib import Path

import pytest

from engine.errors import ModelFileError
from engine.model_files.model_folder import MANIFEST, check_contents, ensure_folder


def build(folder: Path) -> None:
    (folder / "a.txt").write_text("alpha")
    (folder / "b.txt").write_text("beta")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    ensure_folder(tmp_path / "model", build)
    return tmp_path / "model"


def test_a_built_folder_has_a_manifest_and_passes_its_check(folder: Path) -> None:
    files = json.loads((folder / MANIFEST).read_text())["files"]

    assert sorted(files) == ["a.txt", "b.txt"]
    check_contents(folder)


def test_a_folder_that_is_there_is_not_built_again(folder: Path) -> None:
    def fail(path: Path) -> None:
        raise AssertionError(f"built again: {path}")

    ensure_folder(folder, fail)


def test_two_starts_at_once_build_once(tmp_path: Path) -> None:
    started = threading.Barrier(4)
    built: list[Path] = []

    def slow_build(path: Path) -> None:
        built.append(path)
        build(path)

    def start() -> None:
        started.wait()
        ensure_folder(tmp_path / "model", slow_build)

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)

    assert len(built) == 1
    check_contents(tmp_path / "model")


def test_a_failed_build_leaves_nothing_that_could_be_taken_for_a_model(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        build(path)
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        ensure_folder(tmp_path / "model", fail)

    assert [path.name for path in tmp_path.iterdir()] == [".model.lock"]


def test_what_a_killed_build_left_is_removed_by_the_next(tmp_path: Path) -> None:
    left = tmp_path / ".model.partial-x1" / "model"
    left.mkdir(parents=True)
    build(left)

    ensure_folder(tmp_path / "model", build)

    assert sorted(path.name for path in tmp_path.iterdir()) == [".model.lock", "model"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "b.txt").write_text("beta and more"), r"Model file is damaged: .*b\.txt"),
        (lambda f: (f / "b.txt").unlink(), r"Model file is missing: .*b\.txt"),
        (lambda f: (f / MANIFEST).unlink(), r"Model folder is incomplete: .*kvmeter-manifest"),
        (lambda f: (f / MANIFEST).write_text("{"), r"Model file is damaged: .*kvmeter-manifest"),
    ],
    ids=["longer", "removed", "no manifest", "broken manifest"],
)
def test_damage_is_named_with_its_cure_at_the_next_start(folder: Path, damage, message) -> None:
    damage(folder)

    with pytest.raises(ModelFileError, match=f"{message}.*; delete the folder and run"):
        ensure_folder(folder, build)


def test_a_changed_byte_is_found_when_contents_are_read(folder: Path) -> None:
    (folder / "a.txt").write_text("alphA")

    with pytest.raises(ModelFileError, match=r"Model file is damaged: .*a\.txt; delete the folder"):
        check_contents(folder)
