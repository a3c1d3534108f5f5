"""Fixtures of the system tests: the word stack and the SDKs that talk to it, the models."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from billing.price_cards import default_cards_path
from tests.engine.tiny_model import write_tiny_model
from tests.gateway.stack import Stack, running_stack
from tests.models import default_model_dir
from tests.sdk.versions import VERSIONS, Sdk
from tests.system.conversation import Conversation
from tests.system.installation import Installation


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
    """The tiny model's folder, with the default model's tokenizer and template."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", tokenizer_from=smollm2)


@pytest.fixture(scope="session")
def tiny_cards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A price list that sells the tiny model."""
    path = tmp_path_factory.mktemp("prices") / "cards.toml"
    path.write_text(default_cards_path().read_text().replace("smollm2-135m-instruct", "tiny"))
    return path


@pytest.fixture
def installation(tmp_path: Path, tiny_model: Path, tiny_cards: Path) -> Installation:
    """An installation of the tiny model, not started yet; its smallest entry is 32 tokens."""
    return Installation(
        tmp_path / "data",
        model=tiny_model,
        KVMETER_PRICE_CARDS=str(tiny_cards),
        KVMETER_CACHE_MIN_TOKENS="32",
        KVMETER_DTYPE="float32",
    )
