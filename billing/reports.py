"""Usage reports from the transfers: a quantity and an amount for each meter, by group.

A request belongs to the UTC day in which it was booked, and to exactly one. Bookings never go back
in time, so a closed period (`booking.close_period`) has the same report for ever.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any, Literal

from sqlalchemy import ColumnElement, Connection, func, select

from billing.meters import Meter
from billing.money import usd
from billing.tables import holds, requests, transfers

Dimension = Literal["organization", "workspace", "key", "model", "day"]

MS_PER_DAY = 86_400_000

COLUMNS: dict[str, ColumnElement[Any]] = {
    "organization": requests.c.organization_id,
    "workspace": requests.c.workspace_id,
    "key": requests.c.key_id,
    "model": requests.c.model_id,
    "day": holds.c.closed_at_ms // MS_PER_DAY,
}


@dataclass(frozen=True, slots=True)
class UsageRow:
    """The usage of one group; every meter is present, also at zero."""

    group: dict[str, str]
    num_requests: int
    quantities: dict[Meter, int]
    amounts_nanos: dict[Meter, int]

    @property
    def total_nanos(self) -> int:
        """The sum of the five amounts."""
        return sum(self.amounts_nanos.values())

    def as_json(self) -> dict[str, Any]:
        """Return plain data; money is a string of nano-dollars, and dollars with nine places."""
        meters = {
            meter.value: {
                "quantity": self.quantities[meter],
                "amount_nanos": str(self.amounts_nanos[meter]),
                "amount_usd": usd(self.amounts_nanos[meter]),
            }
            for meter in Meter
        }
        return {
            **self.group,
            "requests": self.num_requests,
            "meters": meters,
            "total_nanos": str(self.total_nanos),
            "total_usd": usd(self.total_nanos),
        }


def usage(
    conn: Connection,
    *,
    group_by: Sequence[Dimension] = ("organization",),
    since_ms: int | None = None,
    until_ms: int | None = None,
    organization_id: str | None = None,
) -> list[UsageRow]:
    """Return the usage of requests booked in [since, until): a row for each group, in order.

    Requests without a charge are counted too, so released requests are included.
    """
    columns = [COLUMNS[dimension].label(dimension) for dimension in group_by]
    conditions = _conditions(since_ms, until_ms, organization_id)
    ended = requests.join(holds, holds.c.request_id == requests.c.id)
    counts = select(*columns, func.count()).where(*conditions).group_by(*columns)
    sums = (
        select(
            *columns,
            transfers.c.meter,
            func.sum(transfers.c.quantity),
            func.sum(transfers.c.amount_nanos),
        )
        .select_from(ended.join(transfers, transfers.c.request_id == requests.c.id))
        .where(transfers.c.kind == "usage", *conditions)
        .group_by(*columns, transfers.c.meter)
    )
    rows = {
        tuple(group): _empty_row(group_by, group, num_requests)
        for *group, num_requests in conn.execute(counts.select_from(ended))
    }
    for *group, meter, quantity, amount in conn.execute(sums):
        row = rows[tuple(group)]
        row.quantities[Meter(meter)] = int(quantity)  # PostgreSQL adds integers up to a NUMERIC
        row.amounts_nanos[Meter(meter)] = int(amount)
    return [rows[group] for group in sorted(rows)]


def _conditions(
    since_ms: int | None, until_ms: int | None, organization_id: str | None
) -> list[ColumnElement[bool]]:
    conditions = []
    if since_ms is not None:
        conditions.append(holds.c.closed_at_ms >= since_ms)
    if until_ms is not None:
        conditions.append(holds.c.closed_at_ms < until_ms)
    if organization_id is not None:
        conditions.append(requests.c.organization_id == organization_id)
    return conditions


def _empty_row(group_by: Sequence[Dimension], group: Sequence[Any], num_requests: int) -> UsageRow:
    named: dict[str, str] = {
        dimension: _day(value) if dimension == "day" else value
        for dimension, value in zip(group_by, group, strict=True)
    }
    zeros = dict.fromkeys(Meter, 0)
    return UsageRow(named, num_requests, dict(zeros), dict(zeros))


def _day(days_since_1970: int) -> str:
    return (date(1970, 1, 1) + timedelta(days=days_since_1970)).isoformat()
