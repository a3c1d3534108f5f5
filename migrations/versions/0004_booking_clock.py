"""The booking clock: nothing is booked before the last booking. A request ends after its start.

Revision 0004. Spelled out in SQL and frozen, like 0001.
"""

from alembic import op

from migrations.late_ends import refuse_early_ends

revision = "0004"
down_revision = "0002"

BOOKING_CLOCK = """
    CREATE TABLE booking_clock (
        id BIGINT NOT NULL,
        last_booked_at_ms BIGINT NOT NULL,
        CONSTRAINT pk_booking_clock PRIMARY KEY (id),
        CONSTRAINT ck_booking_clock_one CHECK (id = 1)
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
    """Add the booking clock, the index, and the trigger that refuses an end before the start."""
    sqlite = op.get_bind().dialect.name == "sqlite"
    if not sqlite:
        op.execute("SET LOCAL lock_timeout = '5s'")  # a long reader must not stop every writer
    op.execute(BOOKING_CLOCK.replace("BIGINT", "INTEGER") + "STRICT" if sqlite else BOOKING_CLOCK)
    op.execute(FIRST_ROW)
    op.execute(CLOSED_HOLDS)
    refuse_early_ends()
