"""Integrity: the schema protects what it should, and every row keeps the rules of its table.

A session that switches triggers or constraints off, or writes to the file, leaves rows that the
database would have refused. So foreign keys and CHECKs are asked of every row once more.
"""

from collections.abc import Iterator
from typing import Any

from sqlalchemy import (
    Boolean,
    CheckConstraint,
    ColumnElement,
    Connection,
    ForeignKeyConstraint,
    Row,
    Table,
    and_,
    exists,
    literal_column,
    or_,
    select,
    text,
)

from billing.columns import metadata
from billing.manifest import damaged_names
from billing.scan import scan


def schema_problems(conn: Connection) -> Iterator[str]:
    """Triggers, constraints and indexes are the migrations'."""
    for name in damaged_names(conn):
        yield f"The schema's {name} is missing, changed or switched off."


def file_problems(conn: Connection) -> Iterator[str]:
    """The pages and indexes of a SQLite file are sound. PostgreSQL has no such question."""
    if conn.dialect.name != "sqlite":
        return
    for (line,) in conn.execute(text("PRAGMA integrity_check")):
        if line != "ok" and not line.startswith("CHECK constraint failed"):  # named below, by row
            yield f"The database file is damaged: {line}."


def reference_problems(conn: Connection) -> Iterator[str]:
    """Every reference leads to a row."""
    for table in metadata.sorted_tables:
        foreign_keys = sorted(table.foreign_key_constraints, key=lambda key: str(key.name))
        for foreign_key in foreign_keys:
            yield from _dangling(conn, table, foreign_key)


def rule_problems(conn: Connection) -> Iterator[str]:
    """Every row keeps the CHECKs of its table."""
    for table in metadata.sorted_tables:
        checks = [c for c in table.constraints if isinstance(c, CheckConstraint)]
        if not checks:
            continue
        broken: dict[str, ColumnElement[bool]] = {
            str(check.name): literal_column(f"(NOT ({check.sqltext}))", Boolean) for check in checks
        }
        columns = [condition.label(name) for name, condition in broken.items()]
        breaking = select(*table.primary_key.columns, *columns).where(or_(*broken.values()))
        rows = scan(conn, breaking.select_from(table))
        for row in rows:
            for name in sorted(broken):
                if getattr(row, name):
                    yield f"{_row_name(table, row)} breaks the rule {name}."


def _dangling(conn: Connection, table: Table, foreign_key: ForeignKeyConstraint) -> Iterator[str]:
    parent = foreign_key.referred_table
    pairs = [(element.parent, element.column) for element in foreign_key.elements]
    leads_somewhere = exists().where(*(child == column for child, column in pairs))
    is_set = and_(*(child.is_not(None) for child, _ in pairs))
    columns = dict.fromkeys([*table.primary_key.columns, *(child for child, _ in pairs)])
    for row in scan(conn, select(*columns).where(is_set, ~leads_somewhere)):
        values = ", ".join(str(getattr(row, child.name)) for child, _ in pairs)
        yield f"{_row_name(table, row)} refers to a row that {parent.name} has not: {values}."


def _row_name(table: Table, row: Row[Any]) -> str:
    key = "/".join(str(getattr(row, column.name)) for column in table.primary_key.columns)
    return f"Row {key} of {table.name}"
