"""What someone with the database's password can do: switch protection off, write, put it back."""

import sqlite3
from collections.abc import Callable

from sqlalchemy import Connection, text

from billing.columns import metadata
from tests.billing.books import Books

Execute = Callable[[str], object]


def tamper(books: Books, *statements: str) -> None:
    """Change what the database protects, and leave every trigger and constraint as it was.

    PostgreSQL takes no CHECK back that a row breaks; such a CHECK stays dropped.
    """
    if books.database.read_now(lambda conn: conn.dialect.name) == "sqlite":
        _on_sqlite(sqlite_path(books), statements)
    else:
        books.database.write_now(lambda conn: _on_postgresql(conn, statements))


def sqlite_path(books: Books) -> str:
    """Return the path of the database file."""
    query = "SELECT file FROM pragma_database_list WHERE name = 'main'"
    return str(books.database.read_now(lambda conn: conn.exec_driver_sql(query).scalar_one()))


def _on_sqlite(path: str, statements: tuple[str, ...]) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA ignore_check_constraints = ON")
    triggers = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'")
    kept = triggers.fetchall()
    for name, _ in kept:
        connection.execute(f"DROP TRIGGER {name}")
    for statement in statements:
        connection.execute(statement)
    for _, sql in kept:
        connection.execute(sql)
    connection.close()


def _on_postgresql(conn: Connection, statements: tuple[str, ...]) -> None:
    conn.execute(text("SET LOCAL session_replication_role = 'replica'"))
    checks = conn.execute(
        text(
            "SELECT conrelid ::regclass AS table, conname, pg_get_constraintdef(oid) AS definition"
            " FROM pg_constraint WHERE contype = 'c' AND conrelid ::regclass ::text = ANY(:tables)"
        ),
        {"tables": list(metadata.tables)},
    ).all()
    for table, name, _ in checks:
        conn.execute(text(f"ALTER TABLE {table} DROP CONSTRAINT {name}"))
    for statement in statements:
        conn.exec_driver_sql(statement)
    for table, name, definition in checks:
        savepoint = conn.begin_nested()
        try:
            conn.exec_driver_sql(f"ALTER TABLE {table} ADD CONSTRAINT {name} {definition}")
            savepoint.commit()
        except Exception:  # noqa: BLE001  # a row breaks it now
            savepoint.rollback()
