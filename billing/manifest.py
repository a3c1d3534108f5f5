"""Checks at every start that the database has the schema's triggers, constraints and indexes.

A careless migration drops them without an error: on SQLite a table that Alembic's batch mode copies
loses its triggers and its unnamed CHECKs. Triggers are compared with what the migrations create,
so one that was replaced by one that does nothing is noticed too.
"""

import re
from collections.abc import Sequence

from sqlalchemy import Connection, Table, UniqueConstraint, text

from billing.columns import metadata
from billing.errors import SchemaDamaged
from billing.tables import IMMUTABLE
from migrations import immutable, late_ends

# PostgreSQL's pg_trigger.tgtype: the sum of these.
ROW, BEFORE, INSERT, DELETE, UPDATE, TRUNCATE = 1, 2, 4, 8, 16, 32


def require_manifest(conn: Connection) -> None:
    """Raise SchemaDamaged, naming everything that is missing, changed or switched off."""
    if damaged := damaged_names(conn):
        raise SchemaDamaged(damaged)


def damaged_names(conn: Connection) -> list[str]:
    """Return the names of triggers, constraints and indexes that are missing or changed."""
    sqlite = conn.dialect.name == "sqlite"
    triggers = _sqlite_triggers(conn) if sqlite else _postgresql_triggers(conn)
    expected = _expected_sqlite_triggers() if sqlite else _expected_postgresql_triggers()
    changed = {name for name, body in expected.items() if triggers.get(name) != body}
    existing = _sqlite_names(conn) if sqlite else _postgresql_names(conn)
    return sorted(changed | (_expected_names() - existing))


def _expected_names() -> set[str]:
    constraints = {str(c.name) for table in metadata.tables.values() for c in table.constraints}
    indexes = {str(index.name) for table in metadata.tables.values() for index in table.indexes}
    return constraints | indexes


def _expected_sqlite_triggers() -> dict[str, object]:
    expected: dict[str, object] = {late_ends.TRIGGER: late_ends.SQLITE_TRIGGER}
    for table in IMMUTABLE:
        expected |= immutable.sqlite_triggers(table.name, unique_keys=_unique_keys(table))
    return expected


def _expected_postgresql_triggers() -> dict[str, object]:
    refuses_change = (BEFORE | DELETE | UPDATE | TRUNCATE, immutable.POSTGRESQL_BODY)
    expected: dict[str, object] = {f"{table.name}_immutable": refuses_change for table in IMMUTABLE}
    expected[late_ends.TRIGGER] = (ROW | BEFORE | INSERT, late_ends.POSTGRESQL_BODY)
    return expected


def _unique_keys(table: Table) -> Sequence[Sequence[str]]:
    """Return the primary key and the unique constraints of a table, as migrations state them."""
    unique = [c for c in table.constraints if isinstance(c, UniqueConstraint)]
    ordered = (table.primary_key, *sorted(unique, key=lambda constraint: str(constraint.name)))
    return [[column.name for column in constraint.columns] for constraint in ordered]


def _sqlite_triggers(conn: Connection) -> dict[str, object]:
    triggers = text("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'")
    return {row.name: row.sql for row in conn.execute(triggers)}


def _sqlite_names(conn: Connection) -> set[str]:
    names: set[str] = set()
    objects = text("SELECT type, name, sql FROM sqlite_master WHERE type IN ('index', 'table')")
    for kind, name, sql in conn.execute(objects):
        if kind == "index":
            names.add(name)
        else:
            names.update(re.findall(r"CONSTRAINT (\w+)", sql))
    return names


def _postgresql_triggers(conn: Connection) -> dict[str, object]:
    """Return what each trigger fires on and its function's body; a trigger switched off is none."""
    rows = conn.execute(
        text(
            "SELECT tgname, tgtype, prosrc FROM pg_trigger JOIN pg_proc ON pg_proc.oid = tgfoid"
            " WHERE tgenabled IN ('O', 'A') AND tgrelid IN (SELECT oid FROM pg_class"
            " WHERE relnamespace = current_schema()::regnamespace)"
        )
    )
    return {row.tgname: (row.tgtype, row.prosrc) for row in rows}


def _postgresql_names(conn: Connection) -> set[str]:
    """Return the indexes, and the constraints that were validated against every row."""
    rows = conn.execute(
        text(
            "SELECT conname FROM pg_constraint WHERE convalidated"
            " AND contype IN ('c', 'f', 'p', 'u')"
            " AND connamespace = current_schema()::regnamespace"
            " UNION ALL SELECT indexname FROM pg_indexes WHERE schemaname = current_schema()"
        )
    )
    return {row[0] for row in rows}
