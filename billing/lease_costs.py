"""Lease costs: the KV blocks that each lease has pinned, as the engine reports them.

A report has a lease's totals so far, in block-milliseconds (a block pinned for a millisecond):
contended if the block would have been evicted without the pin, else idle. Totals never fall. So a
report that arrives twice is one row, the next report makes up for a missed one, and the cost of a
lease is its largest report.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sqlalchemy import Connection, func, insert, select

from billing.errors import RowUnreadable
from billing.meters import WritePoint
from billing.rows import from_json, from_row, to_row
from billing.tables import holds, lease_reports

ReportReason = Literal["refreshed", "expired", "unpinned", "lost", "dropped", "stopped"]

_CHUNK = 500  # well under what one statement of either database accepts as parameters


@dataclass(frozen=True, slots=True)
class LeaseCost:
    """The cost so far of the lease on the first `num_tokens` tokens of a request's prompt.

    tier       where the lease is whole at the time of the report
    num_bytes  its size there
    """

    lease_id: str
    request_id: str
    num_tokens: int
    reason: ReportReason
    tier: str
    num_bytes: int
    idle_block_ms: int
    contended_block_ms: int

    @property
    def _key(self) -> tuple[object, ...]:
        return (self.lease_id, self.idle_block_ms, self.contended_block_ms, self.reason)


@dataclass(frozen=True, slots=True)
class PinCost:
    """The cost of a workspace's leases on one model."""

    organization_id: str
    workspace_id: str
    model_id: str
    num_leases: int
    idle_block_ms: int
    contended_block_ms: int


def record_lease_costs(conn: Connection, costs: Sequence[LeaseCost], *, reported_at_ms: int) -> int:
    """Insert the costs that are new; return how many. Those of unknown requests are dropped."""
    return sum(
        _record_chunk(conn, costs[start : start + _CHUNK], reported_at_ms=reported_at_ms)
        for start in range(0, len(costs), _CHUNK)
    )


def leases_of(conn: Connection, request_id: str) -> tuple[LeaseCost, ...]:
    """Return the cost of each lease that a request made: its largest report."""
    rows = conn.execute(
        select(lease_reports)
        .where(lease_reports.c.request_id == request_id)
        .order_by(
            lease_reports.c.tokens,
            lease_reports.c.idle_block_ms + lease_reports.c.contended_block_ms,
            lease_reports.c.reported_at_ms,
        )
    )
    return tuple({row.lease_id: from_row(LeaseCost, row) for row in rows}.values())


def pin_costs(conn: Connection) -> list[PinCost]:
    """Return what leases have cost so far, by workspace and model."""
    lease = (
        select(
            lease_reports.c.request_id,
            func.max(lease_reports.c.idle_block_ms).label("idle"),
            func.max(lease_reports.c.contended_block_ms).label("contended"),
        )
        .group_by(lease_reports.c.lease_id, lease_reports.c.request_id)
        .subquery()
    )
    group = (holds.c.organization_id, holds.c.workspace_id, holds.c.model_id)
    rows = conn.execute(
        select(*group, func.count(), func.sum(lease.c.idle), func.sum(lease.c.contended))
        .join(lease, lease.c.request_id == holds.c.request_id)
        .group_by(*group)
        .order_by(*group)
    )
    return [
        PinCost(organization, workspace, model, num_leases, int(idle), int(contended))
        for organization, workspace, model, num_leases, idle, contended in rows
    ]


def _record_chunk(conn: Connection, costs: Sequence[LeaseCost], *, reported_at_ms: int) -> int:
    entry_keys = _entry_keys(conn, {cost.request_id for cost in costs})
    known = _known_keys(conn, {cost.lease_id for cost in costs})
    # By key: the same report may be in the list twice.
    new = {
        cost._key: cost
        for cost in costs
        if cost.request_id in entry_keys and cost._key not in known
    }
    if new:
        conn.execute(
            insert(lease_reports),
            [
                {
                    **to_row(cost),
                    "entry_key": entry_keys[cost.request_id].get(cost.num_tokens),
                    "reported_at_ms": reported_at_ms,
                }
                for cost in new.values()
            ],
        )
    return len(new)


def _entry_keys(conn: Connection, request_ids: set[str]) -> dict[str, dict[int, str]]:
    """Return, for each known request, the entry keys of its writes by prefix length."""
    rows = conn.execute(
        select(holds.c.request_id, holds.c.writes).where(holds.c.request_id.in_(request_ids))
    )
    return {request_id: _written_keys(writes) for request_id, writes in rows}


def _written_keys(stored: str) -> dict[int, str]:
    """Return the entry keys by prefix length; none if they cannot be read, which `verify` names."""
    try:
        writes = from_json(WritePoint, stored, column="writes")
    except RowUnreadable:
        return {}
    return {write.num_tokens: write.entry_key for write in writes}


def _known_keys(conn: Connection, lease_ids: set[str]) -> set[tuple[object, ...]]:
    rows = conn.execute(select(lease_reports).where(lease_reports.c.lease_id.in_(lease_ids)))
    return {from_row(LeaseCost, row)._key for row in rows}
