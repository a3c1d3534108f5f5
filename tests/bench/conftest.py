"""Fixtures of the exhibits' tests."""

from pathlib import Path

import pytest

from tests.engine.tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A seeded random Llama without tokenizer."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
