"""The first keys are made once, whenever the first start was interrupted."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from billing.customers import find_caller, list_keys
from billing.database import Database, migrate
from gateway.commands.first_keys import FirstKeys, make_first_keys
from gateway.commands.options import new_id

NOW_MS = 1_900_000_000_000


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    url = f"sqlite:///{tmp_path / 'ledger.sqlite3'}"
    migrate(url)
    database = Database(url, now_ms=lambda: 0)
    yield database
    database.close()


def make(database: Database, path: Path) -> FirstKeys | None:
    return make_first_keys(database, path, new_id=new_id, now_ms=NOW_MS)


def test_a_second_start_makes_no_second_set(database: Database, tmp_path: Path) -> None:
    path = tmp_path / "first-keys.json"

    keys = make(database, path)

    assert keys is not None
    assert make(database, path) is None
    assert FirstKeys.read(path) == keys
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(database.read_now(list_keys)) == 2
    caller = database.read_now(lambda conn: find_caller(conn, keys.api_key))
    assert caller is not None
    assert caller.workspace_id == keys.workspace_id


def test_a_start_killed_before_the_rename_is_finished(database: Database, tmp_path: Path) -> None:
    path = tmp_path / "first-keys.json"
    keys = make(database, path)
    path.rename(tmp_path / ".first-keys.json.draft")

    assert make(database, path) == keys
    assert len(database.read_now(list_keys)) == 2


def test_a_torn_draft_is_replaced(database: Database, tmp_path: Path) -> None:
    (tmp_path / ".first-keys.json.draft").write_text('{"organization_id": "org_')

    keys = make(database, tmp_path / "first-keys.json")

    assert keys is not None
    assert database.read_now(lambda conn: find_caller(conn, keys.admin_key)) is not None


def test_nobody_else_can_read_a_draft_left_open(database: Database, tmp_path: Path) -> None:
    draft = tmp_path / ".first-keys.json.draft"
    draft.write_text("{}")
    draft.chmod(0o644)

    make(database, tmp_path / "first-keys.json")

    assert (tmp_path / "first-keys.json").stat().st_mode & 0o777 == 0o600


def test_a_file_that_was_deleted_makes_no_second_set(database: Database, tmp_path: Path) -> None:
    path = tmp_path / "first-keys.json"
    make(database, path)
    path.unlink()

    assert make(database, path) is None
    assert not path.exists()
    assert len(database.read_now(list_keys)) == 2


def test_a_second_data_folder_of_one_database_makes_no_second_set(
    database: Database, tmp_path: Path
) -> None:
    make(database, tmp_path / "first-keys.json")
    other = tmp_path / "other-keys.json"

    assert make(database, other) is None
    assert [file.name for file in tmp_path.glob("*keys*")] == ["first-keys.json"]


def test_the_file_of_another_database_is_replaced(database: Database, tmp_path: Path) -> None:
    path = tmp_path / "first-keys.json"
    path.write_text('{"organization_id": "org_of_another_database"}')

    keys = make(database, path)

    assert keys is not None
    assert FirstKeys.read(path) == keys
