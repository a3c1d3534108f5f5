"""The outbox: one usage row for each charged request, with the amounts of its transfers."""

import json
from collections.abc import Iterator
from typing import Any

from sqlalchemy import Connection, Row, exists, func, literal, select

from billing.checks.requests import posted_by_meter
from billing.meters import Meter
from billing.outbox import USAGE, usage_payload
from billing.scan import each, scan
from billing.tables import holds, outbox, requests, transfers


def outbox_problems(conn: Connection) -> Iterator[str]:
    """Each charged request has its row, each row its charged request."""
    posted = posted_by_meter()
    rows = scan(
        conn,
        select(
            requests.c.id, requests.c.organization_id, requests.c.ended_at_ms,
            holds.c.account_id, posted, outbox.c.payload,
        )
        .join(posted, posted.c.request_id == requests.c.id)
        .join(holds, holds.c.request_id == requests.c.id)
        .outerjoin(outbox, outbox.c.id == literal(f"{USAGE}:") + requests.c.id),
    )  # fmt: skip
    yield from each(rows, _name, _problems)
    request_id = func.substr(outbox.c.id, len(f"{USAGE}:") + 1)
    is_charged = exists().where(
        transfers.c.request_id == request_id, transfers.c.kind == "usage"
    )  # by the index of transfers
    for row in scan(conn, select(outbox.c.id).where(outbox.c.topic == USAGE, ~is_charged)):
        yield f"Outbox row {row.id} is of no charged request."


def _name(row: Row[Any]) -> str:
    return f"Outbox row {USAGE}:{row.id}"


def _problems(row: Row[Any]) -> Iterator[str]:
    if row.payload is None:
        yield f"{_name(row)} is missing."
        return
    expected = usage_payload(
        organization_id=row.organization_id,
        account_id=row.account_id,
        request_id=row.id,
        ended_at_ms=row.ended_at_ms,
        amounts_nanos={
            meter: int(getattr(row, f"nanos_{meter}"))
            for meter in Meter
            if getattr(row, f"posted_{meter}")
        },
    )
    if json.loads(row.payload) != expected:
        yield f"{_name(row)} says other than its request and transfers."
