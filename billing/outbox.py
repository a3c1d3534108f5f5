"""The outbox: rows written in the business transaction and sent later, once each by their id."""

import json
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, insert

from billing.meters import Meter
from billing.tables import outbox

USAGE = "usage"


def usage_payload(
    *,
    organization_id: str,
    account_id: str,
    request_id: str,
    ended_at_ms: int,
    amounts_nanos: Mapping[Meter, int],
) -> dict[str, Any]:
    """Return what is sent of a charged request; amounts are text, so that no reader rounds them."""
    return {
        "organization_id": organization_id,
        "account_id": account_id,
        "request_id": request_id,
        "ended_at_ms": ended_at_ms,
        "amounts_nanos": {meter.value: str(nanos) for meter, nanos in amounts_nanos.items()},
    }


def enqueue_usage(conn: Connection, payload: Mapping[str, Any], *, created_at_ms: int) -> None:
    """Insert a request's row; its id is the request's, so a repeated delivery is recognised."""
    conn.execute(
        insert(outbox),
        {
            "id": f"{USAGE}:{payload['request_id']}",
            "topic": USAGE,
            "payload": json.dumps(payload),
            "created_at_ms": created_at_ms,
        },
    )
