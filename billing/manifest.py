"""Checks at every start that the database has the triggers, constraints and indexes of the schema.

A careless migration drops them without an error: on SQLite a table that Alembic's batch mode copies
loses its triggers and its unnamed CHECKs.
"""

import re

from sqlalchemy import Connection, text

from billing.columns import metadata
from billing.errors import SchemaDamaged
from billing.tables import IMMUTABLE

SQLITE_TRIGGERS = ("no_update", "no_delete", "no_replace")
POSTGRESQL_TRIGGERS = ("immutable",)


def require_manifest(conn: Connection) -> None:
    """Raise SchemaDamaged, naming everything that is missing or switched off."""
    sqlite = conn.dialect.name == "sqlite"
    existing = _sqlite_names(conn) if sqlite else _postgresql_names(conn)
    missing = sorted(_expected_names(SQLITE_TRIGGERS if sqlite else POSTGRESQL_TRIGGERS) - existing)
    if missing:
        raise SchemaDamaged(missing)


def _expected_names(trigger_kinds: tuple[str, ...]) -> set[str]:
    triggers = {f"{table.name}_{kind}" for table in IMMUTABLE for kind in trigger_kinds}
    constraints = {str(c.name) for table in metadata.tables.values() for c in table.constraints}
    indexes = {str(index.name) for table in metadata.tables.values() for index in table.indexes}
    return triggers | constraints | indexes


def _sqlite_names(conn: Connection) -> set[str]:
    names: set[str] = set()
    for kind, name, sql in conn.execute(text("SELECT type, name, sql FROM sqlite_master")):
        if kind in ("trigger", "index"):
            names.add(name)
        elif kind == "table":
            names.update(re.findall(r"CONSTRAINT (\w+)", sql))
    return names


def _postgresql_names(conn: Connection) -> set[str]:
    rows = conn.execute(
        text(
            "SELECT conname FROM pg_constraint WHERE connamespace = current_schema()::regnamespace"
            " UNION ALL SELECT tgname FROM pg_trigger WHERE tgenabled IN ('O', 'A')"
            " AND tgrelid IN (SELECT oid FROM pg_class"
            " WHERE relnamespace = current_schema()::regnamespace)"
            " UNION ALL SELECT indexname FROM pg_indexes WHERE schemaname = current_schema()"
        )
    )
    return {row[0] for row in rows}
