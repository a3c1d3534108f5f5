"""The C kernels as fixtures, for the tests of the engine and those beside `transformers`."""

from pathlib import Path
from typing import get_args

import pytest

from engine.compute.dtype import read_cpuinfo
from engine.compute.native.library import Form, Library, load_library


@pytest.fixture(scope="session")
def kernels_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where this run's kernels are compiled."""
    return tmp_path_factory.mktemp("kernels") / "cache"


@pytest.fixture(scope="session")
def kernels(kernels_folder: Path) -> dict[str, Library]:
    """The C kernels as this processor can have them, as one without AMX can, and as any can."""
    return {
        form: load_library(kernels_folder, cpuinfo=read_cpuinfo(), form=form)
        for form in get_args(Form)
    }


@pytest.fixture(scope="session")
def kernels_file(kernels_folder: Path, kernels: dict[str, Library]) -> Path:
    """One of their files."""
    return min(kernels_folder.iterdir())
