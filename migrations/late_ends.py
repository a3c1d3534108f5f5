"""A trigger that refuses a request that ends before its start; `billing.manifest` compares it.

A trigger and not a CHECK: SQLite adds no CHECK to a table that exists, and requests that were
stored before, under a clock that stepped back, stay as they are. Frozen like `immutable.py`.
"""

from alembic import op

TRIGGER = "requests_no_early_end"
EARLY = "NEW.ended_at_ms < NEW.started_at_ms"
REFUSAL = "requests end after their start"
SQLITE_TRIGGER = (
    f"CREATE TRIGGER {TRIGGER} BEFORE INSERT ON requests WHEN {EARLY}"
    f" BEGIN SELECT RAISE(ABORT, '{REFUSAL}'); END"
)

POSTGRESQL_FUNCTION = "kvmeter_refuse_early_end"
POSTGRESQL_BODY = f" BEGIN RAISE EXCEPTION '{REFUSAL}' USING ERRCODE = 'check_violation'; END "


def refuse_early_ends() -> None:
    """Create the trigger."""
    if op.get_bind().dialect.name == "sqlite":
        op.execute(SQLITE_TRIGGER)
        return
    op.execute(
        f"CREATE FUNCTION {POSTGRESQL_FUNCTION}() RETURNS trigger LANGUAGE plpgsql AS"
        f" $${POSTGRESQL_BODY}$$"
    )
    op.execute(
        f"CREATE TRIGGER {TRIGGER} BEFORE INSERT ON requests FOR EACH ROW WHEN ({EARLY})"
        f" EXECUTE FUNCTION {POSTGRESQL_FUNCTION}()"
    )
