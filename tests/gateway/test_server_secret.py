"""The server secret: one a database, whichever gateway starts first."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from billing.database import Database, migrate
from gateway.commands.server_secret import SECRET_BYTES, load_server_secret
from gateway.errors import ServerSecretError


@pytest.fixture
def database(tmp_path: Path):
    url = f"sqlite:///{tmp_path / 'ledger.sqlite3'}"
    migrate(url)
    database = Database(url, now_ms=lambda: 0)
    yield database
    database.close()


def test_two_data_folders_on_one_database_have_one_secret(database: Database, tmp_path: Path):
    first = load_server_secret(database, older_file=tmp_path / "one" / "server-secret")
    second = load_server_secret(database, older_file=tmp_path / "two" / "server-secret")

    assert first == second
    assert len(first) == SECRET_BYTES


def test_many_first_starts_agree_on_one_secret(database: Database, tmp_path: Path):
    with ThreadPoolExecutor(16) as pool:
        found = pool.map(
            lambda n: load_server_secret(database, older_file=tmp_path / str(n)), range(64)
        )

    assert len(set(found)) == 1


def test_the_secret_of_an_older_version_stays_the_secret(database: Database, tmp_path: Path):
    older_file = tmp_path / "server-secret"
    older_file.write_bytes(b"s" * SECRET_BYTES)

    assert load_server_secret(database, older_file=older_file) == b"s" * SECRET_BYTES
    older_file.unlink()
    assert load_server_secret(database, older_file=older_file) == b"s" * SECRET_BYTES


@pytest.mark.parametrize("num_bytes", [0, SECRET_BYTES - 1])
def test_an_older_secret_that_was_cut_is_refused(
    database: Database, tmp_path: Path, num_bytes: int
):
    older_file = tmp_path / "server-secret"
    older_file.write_bytes(b"s" * num_bytes)

    with pytest.raises(ServerSecretError, match="server-secret is damaged"):
        load_server_secret(database, older_file=older_file)
