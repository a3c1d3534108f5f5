"""Booking time: stamped inside the writer's transaction, never below an earlier booking.

The one row of `booking_clock` has the time of the last booking. Every booking moves it, under the
write lock, so bookings are ordered as their commits are, also those of several gateways whose
clocks differ. A period that has been closed takes no booking any more.
"""

from collections.abc import Callable

from sqlalchemy import Connection, case, select, update

from billing.tables import booking_clock

CLOCK = "booking_clock"  # the execution option that carries the writer's clock


def stamp(conn: Connection, *, not_before_ms: int) -> int:
    """Return the time of what is booked now: the writer's clock, the last booking, or the bound.

    The latest of the three, in milliseconds. `not_before_ms` is when what is booked has happened.
    Only a writing connection of a `Database` has a clock.
    """
    now_ms: Callable[[], int] = conn.get_execution_options()[CLOCK]
    return _advance(conn, max(now_ms(), not_before_ms))


def close_period(conn: Connection, *, until_ms: int) -> None:
    """Let nothing be booked before `until_ms` any more. Idempotent."""
    _advance(conn, until_ms)


def last_booked_at_ms(conn: Connection) -> int:
    """Return the time of the last booking, or the end of the last closed period; 0 at first."""
    return int(conn.execute(select(booking_clock.c.last_booked_at_ms)).scalar_one())


def _advance(conn: Connection, to_ms: int) -> int:
    last_ms = booking_clock.c.last_booked_at_ms
    advancing = (
        update(booking_clock)
        .values(last_booked_at_ms=case((last_ms > to_ms, last_ms), else_=to_ms))
        .returning(last_ms)
    )
    return int(conn.execute(advancing).scalar_one())
