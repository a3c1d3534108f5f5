"""Lease reports: those of one lease are of one breakpoint, and neither of its totals ever falls."""

from collections.abc import Iterator
from typing import Any

from sqlalchemy import Connection, Row, select

from billing.meters import WritePoint
from billing.rows import from_json
from billing.scan import each, scan
from billing.tables import holds, lease_reports


def lease_problems(conn: Connection) -> Iterator[str]:
    """Each report is of a write or a read of its request; the reports of a lease agree."""
    earlier: Row[Any] | None = None
    rows = scan(
        conn,
        select(lease_reports, holds.c.writes)
        .join(holds, holds.c.request_id == lease_reports.c.request_id)
        .order_by(
            lease_reports.c.lease_id,
            lease_reports.c.idle_block_ms,
            lease_reports.c.contended_block_ms,
        ),
    )
    for row in rows:
        yield from each((row,), _name, _entry_problems)
        if earlier is not None and earlier.lease_id == row.lease_id:
            if (earlier.request_id, earlier.tokens) != (row.request_id, row.tokens):
                yield f"{_name(row)} is reported for two breakpoints."
            if earlier.contended_block_ms > row.contended_block_ms:
                yield f"{_name(row)} has a contended total that fell."
        earlier = row


def _name(row: Row[Any]) -> str:
    return f"Lease {row.lease_id}"


def _entry_problems(row: Row[Any]) -> Iterator[str]:
    writes = from_json(WritePoint, row.writes, column="writes")
    keys = {write.num_tokens: write.entry_key for write in writes}
    if row.entry_key != keys.get(row.tokens):
        yield f"{_name(row)} is of another entry than its request wrote."
