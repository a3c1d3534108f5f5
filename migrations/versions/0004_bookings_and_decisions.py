"""The booking clock, decisions on holds, and a refusal of requests that end before they start.

Revision 0004, after 0003. Spelled out in SQL and frozen, like 0001.
"""

from alembic import op

from migrations.immutable import make_immutable
from migrations.late_ends import refuse_early_ends

revision = "0004"
down_revision = "0003"

BOOKING_CLOCK = """
    CREATE TABLE booking_clock (
        id BIGINT NOT NULL,
        last_booked_at_ms BIGINT NOT NULL,
        CONSTRAINT pk_booking_clock PRIMARY KEY (id),
        CONSTRAINT ck_booking_clock_one CHECK (id = 1)
    )
    """

HOLD_DECISIONS = """
    CREATE TABLE hold_decisions (
        request_id TEXT NOT NULL,
        decision TEXT NOT NULL,
        actor TEXT NOT NULL,
        reason TEXT NOT NULL,
        decided_at_ms BIGINT NOT NULL,
        CONSTRAINT pk_hold_decisions PRIMARY KEY (request_id),
        CONSTRAINT ck_hold_decisions_decision CHECK (decision IN ('settled', 'released')),
        CONSTRAINT fk_hold_decisions_request_id FOREIGN KEY(request_id) REFERENCES requests (id)
    )
    """

# The one row begins at the last booking so far.
FIRST_ROW = """
    INSERT INTO booking_clock (id, last_booked_at_ms)
    SELECT 1, COALESCE(MAX(booked), 0) FROM (
        SELECT MAX(booked_at_ms) AS booked FROM transfers
        UNION ALL SELECT MAX(closed_at_ms) FROM holds
    ) AS bookings
    """

# Reports are by booking time.
CLOSED_HOLDS = "CREATE INDEX ix_holds_closed_at_ms ON holds (closed_at_ms)"


def upgrade() -> None:
    """Add the two tables, the index, and the triggers."""
    sqlite = op.get_bind().dialect.name == "sqlite"
    if not sqlite:
        op.execute("SET LOCAL lock_timeout = '5s'")  # a long reader must not stop every writer
    for table in (BOOKING_CLOCK, HOLD_DECISIONS):
        op.execute(table.replace("BIGINT", "INTEGER") + "STRICT" if sqlite else table)
    op.execute(FIRST_ROW)
    op.execute(CLOSED_HOLDS)
    make_immutable("hold_decisions", unique_keys=(("request_id",),))
    refuse_early_ends()
