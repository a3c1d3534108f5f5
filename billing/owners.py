"""Owners: the gateway processes that open holds, their heartbeats and their end.

A hold belongs to the gateway that opened it. Only that gateway closes it, until its row here has
ended. Another gateway ends it when its heartbeat counter has stood still for long enough by the
observer's own monotonic clock: no two clocks are compared. A gateway that was only paused finds
itself ended when it wakes, and its writes raise OwnerEnded or HoldNotOwned.
"""

from dataclasses import dataclass

from sqlalchemy import Connection, exists, insert, select, update

from billing.errors import OtherEngine, OwnerEnded
from billing.holds import Hold
from billing.rows import from_row
from billing.tables import gateways, holds, server_secret


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A gateway process that has not ended, as its row says.

    instance_id  its data folder, of which one process at a time holds the lock
    engine_id    the engine that its requests go to
    beats        its heartbeat counter
    """

    boot_id: str
    instance_id: str
    engine_id: str
    started_at_ms: int
    beats: int


def register(conn: Connection, owner: Owner) -> None:
    """Insert a gateway that starts, and end the earlier ones of its instance.

    The caller holds the instance's lock, so an earlier process of it is dead. Raises OtherEngine
    if a gateway that has not ended uses another engine.
    """
    conn.execute(
        update(gateways)
        .where(gateways.c.instance_id == owner.instance_id, gateways.c.ended_at_ms.is_(None))
        .values(ended_at_ms=owner.started_at_ms, ended_by=owner.boot_id)
    )
    for other in running_owners(conn):
        if other.engine_id != owner.engine_id:
            raise OtherEngine(other.boot_id, beats=other.beats)
    conn.execute(
        insert(gateways),
        {
            "boot_id": owner.boot_id,
            "instance_id": owner.instance_id,
            "engine_id": owner.engine_id,
            "started_at_ms": owner.started_at_ms,
            "beats": owner.beats,
        },
    )


def running_owners(conn: Connection) -> list[Owner]:
    """Return the gateways that have not ended, oldest first."""
    running = select(gateways).where(gateways.c.ended_at_ms.is_(None))
    return [
        from_row(Owner, row) for row in conn.execute(running.order_by(gateways.c.started_at_ms))
    ]


def beat(conn: Connection, boot_id: str) -> None:
    """Count one heartbeat. Raises OwnerEnded."""
    counting = (
        update(gateways)
        .where(gateways.c.boot_id == boot_id, gateways.c.ended_at_ms.is_(None))
        .values(beats=gateways.c.beats + 1)
    )
    if conn.execute(counting).rowcount == 0:
        raise OwnerEnded(boot_id)


def end_owner(conn: Connection, owner: Owner, *, ended_by: str, ended_at_ms: int) -> bool:
    """End a gateway, unless its heart has beaten since `owner` was read; return whether it ended.

    A gateway that stops in order ends itself.
    """
    ending = (
        update(gateways)
        .where(
            gateways.c.boot_id == owner.boot_id,
            gateways.c.beats == owner.beats,
            gateways.c.ended_at_ms.is_(None),
        )
        .values(ended_at_ms=ended_at_ms, ended_by=ended_by)
    )
    return conn.execute(ending).rowcount == 1


def end_self(conn: Connection, boot_id: str, *, ended_at_ms: int) -> None:
    """End a gateway that stops in order. Idempotent."""
    conn.execute(
        update(gateways)
        .where(gateways.c.boot_id == boot_id, gateways.c.ended_at_ms.is_(None))
        .values(ended_at_ms=ended_at_ms, ended_by=boot_id)
    )


def require_running(conn: Connection, boot_id: str) -> None:
    """Raise OwnerEnded if the gateway has ended: it must not open a hold."""
    if not is_running(conn, boot_id):
        raise OwnerEnded(boot_id)


def is_running(conn: Connection, boot_id: str) -> bool:
    """Whether the gateway has a row that has not ended."""
    running = select(gateways.c.boot_id).where(
        gateways.c.boot_id == boot_id, gateways.c.ended_at_ms.is_(None)
    )
    return conn.scalar(running) is not None


def holds_to_close(conn: Connection, boot_id: str) -> list[Hold]:
    """Return the open holds of this gateway and of those that have ended, oldest first.

    Without their writes: one whose writes cannot be read must not hide the others.
    """
    owner_runs = exists().where(
        gateways.c.boot_id == holds.c.owner_boot_id, gateways.c.ended_at_ms.is_(None)
    )
    closable = (
        select(holds)
        .where(holds.c.state == "open", (holds.c.owner_boot_id == boot_id) | ~owner_runs)
        .order_by(holds.c.started_at_ms)
    )
    return [from_row(Hold, row, writes=()) for row in conn.execute(closable)]


def take_over(conn: Connection, hold: Hold, *, boot_id: str) -> bool:
    """Make an open hold this gateway's, if it is still the owner's that it was read with."""
    taking = (
        update(holds)
        .where(
            holds.c.request_id == hold.request_id,
            holds.c.owner_boot_id == hold.owner_boot_id,
            holds.c.state == "open",
        )
        .values(owner_boot_id=boot_id)
    )
    return conn.execute(taking).rowcount == 1


def server_secret_of(conn: Connection, *, proposed: bytes) -> bytes:
    """Return the database's one server secret; the first caller's proposal becomes it."""
    stored = conn.scalar(select(server_secret.c.secret_hex))
    if stored is not None:
        return bytes.fromhex(stored)
    conn.execute(insert(server_secret), {"id": 1, "secret_hex": proposed.hex()})
    return proposed
