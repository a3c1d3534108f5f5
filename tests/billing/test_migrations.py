"""Migrations give the tables of the code, once, and what protects the ledger is counted."""

import subprocess
import sys
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, inspect, text

from billing import database as databases
from billing.columns import metadata
from billing.database import Database, migrate
from billing.errors import DatabaseNotMigrated, DatabaseUnreachable, DatabaseUrlError, SchemaDamaged
from billing.tables import IMMUTABLE
from tests.billing.books import no_clock


def run(url: str, *statements: str) -> None:
    engine = databases.writing_engine(databases.database_url(url))
    with engine.begin() as conn:
        for statement in statements:
            conn.execute(text(statement))
    engine.dispose()


def check_names(conn: Connection) -> dict[str, dict[str | None, str]]:
    """Every CHECK by table and name, its text without spaces, brackets and casts."""

    def plain(sql: str) -> str:
        return "".join(sql.lower().replace("::text", "").split()).replace("(", "").replace(")", "")

    return {
        table: {
            check["name"]: plain(str(check["sqltext"]))
            for check in inspect(conn).get_check_constraints(table)
        }
        for table in metadata.tables
    }


def test_a_ledger_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite3"
    database = Database(f"sqlite:///{path}", now_ms=no_clock)
    with pytest.raises(DatabaseNotMigrated):
        database.require_migrated()  # opens it, and so makes it

    migrate(f"sqlite:///{path}")

    assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o600}
    database.close()


def test_another_process_that_comes_and_goes_leaves_the_log_in_place(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite3"
    migrate(f"sqlite:///{path}")
    database = Database(f"sqlite:///{path}", now_ms=no_clock)
    database.write_now(lambda conn: conn.exec_driver_sql("CREATE TABLE ours (x)"))
    database.require_migrated()

    other = "import sqlite3, sys; sqlite3.connect(sys.argv[1]).execute('CREATE TABLE theirs (x)')"
    subprocess.run([sys.executable, "-c", other, str(path)], check=True)

    assert path.with_name("ledger.sqlite3-wal").exists(), "deleted under an open connection"
    tables = database.read_now(lambda conn: inspect(conn).get_table_names())
    assert {"ours", "theirs"} <= set(tables)
    database.close()


def test_a_migrated_database_has_exactly_the_tables_of_the_code(empty_url: str) -> None:
    migrate(empty_url)

    engine = databases.writing_engine(databases.database_url(empty_url))
    with engine.connect() as conn:
        assert compare_metadata(MigrationContext.configure(conn), metadata) == []
        migrated = check_names(conn)
    with engine.begin() as conn:
        for table in reversed(metadata.sorted_tables):
            conn.execute(text(f"DROP TABLE {table.name}"))
        metadata.create_all(conn)
        assert check_names(conn) == migrated
    engine.dispose()


def test_migrating_again_changes_nothing(empty_url: str) -> None:
    migrate(empty_url)
    migrate(empty_url)

    database = Database(empty_url, now_ms=no_clock)
    database.require_migrated()
    database.close()


def test_several_processes_may_migrate_at_once(empty_url: str) -> None:
    script = "import sys; from billing.database import migrate; migrate(sys.argv[1])"
    processes = [
        subprocess.Popen([sys.executable, "-c", script, empty_url], stderr=subprocess.PIPE)
        for _ in range(3)
    ]

    outcomes = [(process.communicate(timeout=60)[1], process.returncode) for process in processes]

    assert outcomes == [(b"", 0)] * 3
    database = Database(empty_url, now_ms=no_clock)
    database.require_migrated()
    database.close()


def test_a_database_that_is_not_migrated_is_refused(empty_url: str) -> None:
    database = Database(empty_url, now_ms=no_clock)

    with pytest.raises(DatabaseNotMigrated, match="kvmeter migrate"):
        database.require_migrated()
    database.close()


def test_a_database_of_another_version_is_refused(database_url: str) -> None:
    run(database_url, "UPDATE alembic_version SET version_num = '0000'")
    database = Database(database_url, now_ms=no_clock)

    with pytest.raises(DatabaseNotMigrated, match="found 0000, expected 0004"):
        database.require_migrated()
    database.close()


@pytest.mark.parametrize("table", [table.name for table in IMMUTABLE])
def test_a_dropped_trigger_is_noticed(database_url: str, table: str) -> None:
    sqlite = database_url.startswith("sqlite")
    trigger = f"{table}_no_delete" if sqlite else f"{table}_immutable"
    run(database_url, f"DROP TRIGGER {trigger}" + ("" if sqlite else f" ON {table}"))
    database = Database(database_url, now_ms=no_clock)

    with pytest.raises(SchemaDamaged) as damage:
        database.require_migrated()

    assert damage.value.damaged == (trigger,)
    database.close()


def test_a_disabled_trigger_and_a_dropped_check_are_noticed(postgres_url: str) -> None:
    run(
        postgres_url,
        "ALTER TABLE transfers DISABLE TRIGGER transfers_immutable",
        "ALTER TABLE transfers DROP CONSTRAINT ck_transfers_amount",
    )
    database = Database(postgres_url, now_ms=no_clock)

    with pytest.raises(SchemaDamaged) as damage:
        database.require_migrated()

    assert damage.value.damaged == ("ck_transfers_amount", "transfers_immutable")
    database.close()


@pytest.mark.parametrize("table", [table.name for table in IMMUTABLE])
def test_a_trigger_that_does_nothing_is_noticed(database_url: str, table: str) -> None:
    if database_url.startswith("sqlite"):
        trigger = f"{table}_no_update"
        emptied = f"CREATE TRIGGER {trigger} BEFORE UPDATE ON {table} BEGIN SELECT 1; END"
        run(database_url, f"DROP TRIGGER {trigger}", emptied)
    else:
        trigger = f"{table}_immutable"
        run(
            database_url,
            "CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS"
            " $$ BEGIN RETURN NULL; END $$",
            f"DROP TRIGGER {trigger} ON {table}",
            f"CREATE TRIGGER {trigger} BEFORE UPDATE OR DELETE OR TRUNCATE ON {table}"
            " FOR EACH STATEMENT EXECUTE FUNCTION nothing()",
        )
    database = Database(database_url, now_ms=no_clock)

    with pytest.raises(SchemaDamaged) as damage:
        database.require_migrated()

    assert damage.value.damaged == (trigger,)
    database.close()


def test_a_trigger_that_fires_on_less_and_a_check_of_new_rows_only_are_noticed(
    postgres_url: str,
) -> None:
    run(
        postgres_url,
        "DROP TRIGGER transfers_immutable ON transfers",
        "CREATE TRIGGER transfers_immutable BEFORE TRUNCATE ON transfers"
        " FOR EACH STATEMENT EXECUTE FUNCTION kvmeter_refuse_change()",
        "ALTER TABLE transfers DROP CONSTRAINT ck_transfers_two_ends",
        "ALTER TABLE transfers ADD CONSTRAINT ck_transfers_two_ends"
        " CHECK (debit_account_id <> credit_account_id) NOT VALID",
    )
    database = Database(postgres_url, now_ms=no_clock)

    with pytest.raises(SchemaDamaged) as damage:
        database.require_migrated()

    assert damage.value.damaged == ("ck_transfers_two_ends", "transfers_immutable")
    database.close()


def test_a_table_rebuilt_without_its_index_is_noticed(database_url: str) -> None:
    run(
        database_url,
        "ALTER TABLE outbox RENAME TO outbox_old",
        "CREATE TABLE outbox (id TEXT PRIMARY KEY)",
        "DROP TABLE outbox_old",
    )
    database = Database(database_url, now_ms=no_clock)

    with pytest.raises(SchemaDamaged, match="ix_outbox_created_at_ms"):
        database.require_migrated()
    database.close()


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("nonsense", "not of the form"),
        ("sqlite://", "needs a file"),
        ("sqlite:///:memory:", "needs a file"),
        ("mysql://localhost/x", "not mysql"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused(url: str, problem: str) -> None:
    with pytest.raises(DatabaseUrlError, match=problem):
        Database(url, now_ms=no_clock)


def test_a_database_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken.db"
    broken.write_text("this is no database" * 100)
    for url in (
        f"sqlite:///{tmp_path}/no/such/folder/ledger.db",
        f"sqlite:///{broken}",
        "postgresql://someone:secret@127.0.0.1:1/ledger",
    ):
        with pytest.raises(DatabaseUnreachable, match="cannot be opened") as refusal:
            migrate(url)
        assert "secret" not in str(refusal.value)
        assert "\n" not in str(refusal.value)

        database = Database(url, now_ms=no_clock)
        with pytest.raises(DatabaseUnreachable):
            database.require_migrated()
        database.close()
