"""Holds: readable, closed exactly when their request is final, and by hand only with a decision."""

from collections.abc import Iterator
from typing import Any

from sqlalchemy import Connection, Row, and_, or_, select

from billing.decisions import RELEASE_REASON
from billing.holds import Hold
from billing.rows import from_row
from billing.scan import each, scan
from billing.tables import hold_decisions, holds, requests


def hold_problems(conn: Connection) -> Iterator[str]:
    """A hold is closed if and only if its request has its final row, and can be read."""
    yield from each(scan(conn, select(holds)), _name, _reading)
    is_open, is_final = holds.c.state == "open", requests.c.id.is_not(None)
    rows = scan(
        conn,
        select(holds.c.request_id, holds.c.state, is_final.label("is_final"))
        .outerjoin(requests, requests.c.id == holds.c.request_id)
        .where(or_(and_(is_open, is_final), and_(~is_open, ~is_final))),
    )
    for row in rows:
        final = "a final" if row.is_final else "no final"
        yield f"Hold {row.request_id} is {row.state} and has {final} request."


def decision_problems(conn: Connection) -> Iterator[str]:
    """A decision is of a hold that was closed so, then; a release by hand has its decision."""
    decided = (
        select(hold_decisions, holds.c.closed_at_ms, requests.c.release_reason)
        .join(holds, holds.c.request_id == hold_decisions.c.request_id)
        .join(requests, requests.c.id == hold_decisions.c.request_id)
    )
    for row in scan(conn, decided):
        was_released = row.release_reason == RELEASE_REASON
        if was_released != (row.decision == "released"):
            yield f"Decision on {row.request_id} is {row.decision}, and its hold was not."
        if row.decided_at_ms != row.closed_at_ms:
            yield f"Decision on {row.request_id} is of another time: {row.decided_at_ms}."
    undecided = (
        select(requests.c.id)
        .outerjoin(hold_decisions, hold_decisions.c.request_id == requests.c.id)
        .where(requests.c.release_reason == RELEASE_REASON, hold_decisions.c.request_id.is_(None))
    )
    for row in scan(conn, undecided):
        yield f"Request {row.id} was released by hand without a decision."


def _name(row: Row[Any]) -> str:
    return f"Hold {row.request_id}"


def _reading(row: Row[Any]) -> Iterator[str]:
    """Read the hold and its writes; what fails is the problem."""
    hold = from_row(Hold, row)
    for write in hold.writes:
        if not hold.read_tokens <= write.num_tokens <= hold.total_tokens:
            yield f"Hold {row.request_id} has a write outside its prompt: {write.num_tokens}."
