"""Decisions: an operator closes a hold that neither its gateway nor recovery could close.

Each is a row for ever, with who decided and why, beside the request's final row.
"""

from dataclasses import dataclass
from typing import Literal

from sqlalchemy import Connection, insert, select

from billing.booking import last_booked_at_ms
from billing.errors import HoldInUse, HoldNotOpen
from billing.facts import EngineFacts
from billing.holds import hold_row
from billing.owners import is_running
from billing.rows import from_row, to_row
from billing.settlement import CutBy, Settlement, release, settle
from billing.tables import hold_decisions

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
    conn: Connection,
    *,
    request_id: str,
    actor: str,
    reason: str,
    now_ms: int,
    force: bool = False,
) -> Settlement:
    """Release an open hold: the request is free.

    `force` also closes the hold of a gateway that runs; its own close then changes nothing. Raises
    HoldNotFound, HoldNotOpen or HoldInUse.
    """
    owner_boot_id = _closable(conn, request_id, force=force)
    settlement = release(
        conn,
        request_id=request_id,
        owner_boot_id=owner_boot_id,
        reason=RELEASE_REASON,
        ended_at_ms=now_ms,
    )
    _record(conn, settlement, "released", actor=actor, reason=reason)
    return settlement


def settle_by_operator(
    conn: Connection,
    *,
    request_id: str,
    facts: EngineFacts,
    cut_by: CutBy | None = None,
    actor: str,
    reason: str,
    now_ms: int,
    force: bool = False,
) -> Settlement:
    """Settle an open hold from an engine record, by the same table as any other request.

    Raises as `release_by_operator`, and InconsistentFacts or RowUnreadable, after which the hold is
    open as before.
    """
    owner_boot_id = _closable(conn, request_id, force=force)
    settlement = settle(
        conn,
        request_id=request_id,
        owner_boot_id=owner_boot_id,
        facts=facts,
        ended_at_ms=now_ms,
        stop_reason=None,
        cut_by=cut_by,
    )
    _record(conn, settlement, "settled", actor=actor, reason=reason)
    return settlement


def decision_on(conn: Connection, request_id: str) -> Decision | None:
    """Return the decision on a hold, or None if it was not closed by hand."""
    query = select(hold_decisions).where(hold_decisions.c.request_id == request_id)
    row = conn.execute(query).one_or_none()
    return None if row is None else from_row(Decision, row)


def _closable(conn: Connection, request_id: str, *, force: bool) -> str:
    """Return the owner of a hold that may be closed by hand."""
    hold = hold_row(conn, request_id)
    owner_boot_id: str = hold["owner_boot_id"]
    if hold["state"] != "open":
        raise HoldNotOpen(request_id, state=hold["state"])
    if not force and is_running(conn, owner_boot_id):
        raise HoldInUse(request_id, owner_boot_id=owner_boot_id)
    return owner_boot_id


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
