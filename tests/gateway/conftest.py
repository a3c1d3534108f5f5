"""Fixtures of the gateway's tests: the event loop, and the operator's commands."""

from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.commands import main

Run = Callable[..., str]


@pytest.fixture
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DATA_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def run(data_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `kvmeter` in this process; returns its stdout, or its stderr if it fails as expected."""

    def run(*arguments: str, fails: bool = False) -> str:
        monkeypatch.setattr("sys.argv", ["kvmeter", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        assert bool(ended.value.code) == fails, captured.err
        if fails:
            assert captured.out == ""
            assert len(captured.err.strip().splitlines()) == 1, captured.err
        return captured.err if fails else captured.out

    return run


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
