"""Options and settings of every test; imports nothing heavy."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--soak` is the long form of the random and kill tests; `make soak` sets it."""
    parser.addoption("--soak", action="store_true", help="run the long forms")


@pytest.fixture
def anyio_backend() -> str:
    """The only event loop that we serve on."""
    return "asyncio"


@pytest.fixture(scope="session")
def soak(request: pytest.FixtureRequest) -> bool:
    """Whether this is the long run."""
    return bool(request.config.getoption("--soak"))
