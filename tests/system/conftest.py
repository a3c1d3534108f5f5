"""Fixtures of the system tests: the word stack and the SDKs that talk to it, the models."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.gateway.stack import Stack, running_stack

from tests.engine.tiny_model import write_tiny_model
from tests.models import default_model_dir
from tests.sdk.versions import VERSIONS, Sdk
from tests.system.conversation import Conversation


@pytest.fixture(scope="session", params=VERSIONS)
def sdk(request: pytest.FixtureRequest) -> Iterator[Sdk]:
    """Each version of the official SDK in turn."""
    with Sdk(request.param) as sdk:
        yield sdk


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    """The application over the real engine core, in words."""
    with running_stack(tmp_path, settings={"ping_seconds": 0.1}) as stack:
        yield stack


@pytest.fixture
def talk(stack: Stack, sdk: Sdk) -> Conversation:
    """The first organisation, through one SDK version."""
    return Conversation(sdk, base_url=stack.url, api_key=stack.key)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model's folder."""
    return default_model_dir()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Path:
    """The tiny model's folder, named as it is sold."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", tokenizer_from=smollm2)
