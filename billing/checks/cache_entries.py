"""Cache entries: each is a write of its request, and paid for if the request has ended."""

from collections.abc import Iterator
from typing import Any

from sqlalchemy import Connection, Row, func, literal, select

from billing.meters import WritePoint
from billing.rows import from_json
from billing.scan import each, scan
from billing.tables import cache_entries, holds, requests


def entry_problems(conn: Connection) -> Iterator[str]:
    """An entry is a write that its request asked for; once that has ended, one that it paid for.

    An entry lives one TTL from the start of a request, its writer's or its last reader's.
    """
    newest_ms = conn.scalar(select(func.max(holds.c.started_at_ms))) or 0
    rows = scan(
        conn,
        select(
            cache_entries,
            holds.c.writes.label("asked"),
            holds.c.started_at_ms,
            requests.c.writes.label("paid"),
            literal(newest_ms).label("newest_ms"),
        )
        .join(holds, holds.c.request_id == cache_entries.c.request_id)
        .outerjoin(requests, requests.c.id == cache_entries.c.request_id),
    )
    yield from each(rows, _name, _problems)


def _name(row: Row[Any]) -> str:
    return f"Cache entry {row.entry_key} of {row.request_id}"


def _problems(row: Row[Any]) -> Iterator[str]:
    entry = WritePoint(row.tokens, row.ttl_class, row.entry_key)
    if entry not in from_json(WritePoint, row.asked, column="writes"):
        yield f"{_name(row)} is none that its request asked for."
    elif row.paid is not None:
        if entry not in from_json(WritePoint, row.paid, column="writes"):
            yield f"{_name(row)} was not paid for."
        elif row.state != "live":
            yield f"{_name(row)} is {row.state} and its request has ended."
    renewed_at_ms = row.expires_at_ms - row.ttl_ms
    if not row.started_at_ms <= renewed_at_ms <= row.newest_ms:
        yield f"{_name(row)} expires at a time that no request gave it: {row.expires_at_ms}."
