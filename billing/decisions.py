"""Decisions: an operator closes a hold that neither its gateway nor recovery could close.

Each is a row for ever, with who decided and why, beside the request's final row.
"""

from dataclasses import dataclass
from typing import Literal

from sqlalchemy import Connection, insert, select

from billing.booking import last_booked_at_ms
from billing.errors import HoldNotFound, HoldNotOpen
from billing.facts import EngineFacts
from billing.rows import from_row, to_row
from billing.settlement import Settlement, release, settle
from billing.tables import hold_decisions, holds

RELEASE_REASON = "operator"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Who closed a hold by hand, how, and why."""

    request_id: str
    decision: Literal["settled", "released"]
    actor: str
    reason: str
    decided_at_ms: int


def release_by_operator(
    conn: Connection, *, request_id: str, actor: str, reason: str, now_ms: int
) -> Settlement:
    """Release an open hold: the request is free. Raises HoldNotFound or HoldNotOpen."""
    _require_open(conn, request_id)
    settlement = release(conn, request_id=request_id, reason=RELEASE_REASON, ended_at_ms=now_ms)
    _record(conn, settlement, "released", actor=actor, reason=reason)
    return settlement


def settle_by_operator(
    conn: Connection, *, request_id: str, facts: EngineFacts, actor: str, reason: str, now_ms: int
) -> Settlement:
    """Settle an open hold from an engine record, by the same table as any other request.

    Raises HoldNotFound or HoldNotOpen, or InconsistentFacts or RowUnreadable, after which the hold
    is open as before.
    """
    _require_open(conn, request_id)
    settlement = settle(
        conn, request_id=request_id, facts=facts, ended_at_ms=now_ms, stop_reason=None
    )
    _record(conn, settlement, "settled", actor=actor, reason=reason)
    return settlement


def decision_on(conn: Connection, request_id: str) -> Decision | None:
    """Return the decision on a hold, or None if it was not closed by hand."""
    query = select(hold_decisions).where(hold_decisions.c.request_id == request_id)
    row = conn.execute(query).one_or_none()
    return None if row is None else from_row(Decision, row)


def _require_open(conn: Connection, request_id: str) -> None:
    state = conn.scalar(select(holds.c.state).where(holds.c.request_id == request_id))
    if state is None:
        raise HoldNotFound(request_id)
    if state != "open":
        raise HoldNotOpen(request_id, state=state)


def _record(
    conn: Connection,
    settlement: Settlement,
    decision: Literal["settled", "released"],
    *,
    actor: str,
    reason: str,
) -> None:
    made = Decision(
        request_id=settlement.record.request_id,
        decision=decision,
        actor=actor,
        reason=reason,
        decided_at_ms=last_booked_at_ms(conn),  # the close of the hold, in this transaction
    )
    conn.execute(insert(hold_decisions), to_row(made))
