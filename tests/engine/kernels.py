"""The C kernels as fixtures, for the tests of the engine and those beside `transformers`."""

from pathlib import Path

import pytest

from engine.compute.dtype import read_cpuinfo
from engine.compute.native.library import Library, load_library


@pytest.fixture(scope="session")
def kernels_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where this run's kernels are compiled."""
    return tmp_path_factory.mktemp("kernels") / "cache"


@pytest.fixture(scope="session")
def kernels(kernels_folder: Path) -> dict[str, Library]:
    """The C kernels as this processor can have them, and as any can."""
    return {
        name: load_library(kernels_folder, cpuinfo=read_cpuinfo(), is_portable=name == "portable")
        for name in ("native", "portable")
    }


@pytest.fixture(scope="session")
def kernels_file(kernels_folder: Path, kernels: dict[str, Library]) -> Path:
    """One of their files."""
    return min(kernels_folder.iterdir())
