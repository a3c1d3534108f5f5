"""The outbox: one usage row for each charged request, with the amounts of its transfers."""

import json
from collections.abc import Iterator
from typing import Any

from sqlalchemy import Connection, Row, exists, literal, select

from billing.checks.requests import posted_by_meter
from billing.meters import Meter
from billing.outbox import USAGE, usage_payload
from billing.scan import each, scan
from billing.tables import holds, outbox, requests


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
    charged = exists().where(outbox.c.id == literal(f"{USAGE}:") + posted.c.request_id)
    for row in scan(conn, select(outbox.c.id).where(outbox.c.topic == USAGE, ~charged)):
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
