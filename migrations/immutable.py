"""Triggers that make a table append-only; `billing.manifest` compares a database's with these.

Frozen with the migrations that use it: a change here would not reach databases already migrated.
"""

from collections.abc import Sequence

from alembic import op

POSTGRESQL_FUNCTION = "kvmeter_refuse_change"
POSTGRESQL_BODY = " BEGIN RAISE EXCEPTION '% is append-only', TG_TABLE_NAME; END "


def make_immutable(table: str, *, unique_keys: Sequence[Sequence[str]]) -> None:
    """Create triggers that refuse UPDATE, DELETE, TRUNCATE and REPLACE, even of no row."""
    if op.get_bind().dialect.name == "sqlite":
        for statement in sqlite_triggers(table, unique_keys=unique_keys).values():
            op.execute(statement)
    else:
        _on_postgresql(table)


def sqlite_triggers(table: str, *, unique_keys: Sequence[Sequence[str]]) -> dict[str, str]:
    """Return the statements that create a table's triggers on SQLite, by the triggers' names."""
    refuse = f"BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END"
    # INSERT OR REPLACE removes the old row without firing the DELETE trigger.
    same_key = " OR ".join(
        "(" + " AND ".join(f"{column} = NEW.{column}" for column in key) + ")"
        for key in unique_keys
    )
    exists = f"EXISTS (SELECT 1 FROM {table} WHERE {same_key})"  # noqa: S608  # our own names
    events = {
        f"{table}_no_update": f"BEFORE UPDATE ON {table}",
        f"{table}_no_delete": f"BEFORE DELETE ON {table}",
        f"{table}_no_replace": f"BEFORE INSERT ON {table} WHEN {exists}",
    }
    return {name: f"CREATE TRIGGER {name} {event} {refuse}" for name, event in events.items()}


def _on_postgresql(table: str) -> None:
    op.execute(
        f"CREATE OR REPLACE FUNCTION {POSTGRESQL_FUNCTION}() RETURNS trigger LANGUAGE plpgsql AS"
        f" $${POSTGRESQL_BODY}$$"
    )
    # For each statement, so that an UPDATE of no row is refused as well.
    op.execute(
        f"CREATE TRIGGER {table}_immutable BEFORE UPDATE OR DELETE OR TRUNCATE ON {table}"
        f" FOR EACH STATEMENT EXECUTE FUNCTION {POSTGRESQL_FUNCTION}()"
    )
