"""Triggers that make a table append-only; `billing.manifest` asserts that they exist.

Frozen with the migrations that use it: a change here would not reach databases already migrated.
"""

from collections.abc import Sequence

from alembic import op


def make_immutable(table: str, *, unique_keys: Sequence[Sequence[str]]) -> None:
    """Create triggers that refuse UPDATE, DELETE, TRUNCATE and REPLACE, even of no row."""
    if op.get_bind().dialect.name == "sqlite":
        _on_sqlite(table, unique_keys)
    else:
        _on_postgresql(table)


def _on_sqlite(table: str, unique_keys: Sequence[Sequence[str]]) -> None:
    refuse = f"BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END"
    op.execute(f"CREATE TRIGGER {table}_no_update BEFORE UPDATE ON {table} {refuse}")
    op.execute(f"CREATE TRIGGER {table}_no_delete BEFORE DELETE ON {table} {refuse}")
    # INSERT OR REPLACE removes the old row without firing the DELETE trigger.
    same_key = " OR ".join(
        "(" + " AND ".join(f"{column} = NEW.{column}" for column in key) + ")"
        for key in unique_keys
    )
    exists = f"EXISTS (SELECT 1 FROM {table} WHERE {same_key})"  # noqa: S608  # our own names
    op.execute(f"CREATE TRIGGER {table}_no_replace BEFORE INSERT ON {table} WHEN {exists} {refuse}")


def _on_postgresql(table: str) -> None:
    op.execute(
        "CREATE OR REPLACE FUNCTION kvmeter_refuse_change() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE EXCEPTION '% is append-only', TG_TABLE_NAME; END $$"
    )
    # For each statement, so that an UPDATE of no row is refused as well.
    op.execute(
        f"CREATE TRIGGER {table}_immutable BEFORE UPDATE OR DELETE OR TRUNCATE ON {table}"
        " FOR EACH STATEMENT EXECUTE FUNCTION kvmeter_refuse_change()"
    )
