"""Each test gets its own migrated database, on SQLite and on a real PostgreSQL."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import make_url

from billing.database import Database, migrate
from tests.billing.books import no_clock
from tests.postgres import NewDatabase, postgres_server

DIALECTS = ("sqlite", "postgresql")


@pytest.fixture(scope="session")
def new_postgres() -> Iterator[NewDatabase]:
    with postgres_server() as new_database:
        yield new_database


@pytest.fixture(scope="session")
def migrated_postgres(new_postgres: NewDatabase) -> str:
    url = new_postgres()
    migrate(url)
    return str(make_url(url).database)


@pytest.fixture(scope="session")
def migrated_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("migrated") / "ledger.db"
    migrate(f"sqlite:///{path}")
    return path


@pytest.fixture(params=DIALECTS)
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'ledger.db'}"
    new_database: NewDatabase = request.getfixturevalue("new_postgres")
    return new_database()


@pytest.fixture(params=DIALECTS)
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        path = tmp_path / "ledger.db"
        shutil.copy(request.getfixturevalue("migrated_sqlite"), path)
        return f"sqlite:///{path}"
    url: str = request.getfixturevalue("postgres_url")
    return url


@pytest.fixture
def postgres_url(new_postgres: NewDatabase, migrated_postgres: str) -> str:
    return new_postgres(migrated_postgres)


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    database = Database(database_url, now_ms=no_clock)
    yield database
    database.close()
