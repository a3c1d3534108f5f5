"""Cache entries: the promise that a prefix will be read at the read price until it expires.

A row belongs to the request that writes it: `pending` from its hold, `live` from the moment the
engine has committed the prefix. Whoever meets a pending one may wait for it, until the deadline in
its row. Those who did not wait write the same key too and each pays, so each keeps its own row;
readers see one entry a key, the longest-lived. So neither a later, shorter write nor the failure of
one writer takes away what another paid for.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, delete, insert, select, update

from billing.meters import TtlClass, WritePoint
from billing.tables import cache_entries, holds

_live = cache_entries.c.state == "live"


@dataclass(frozen=True, slots=True)
class Entry:
    """A live promise: the exact prefix length, and until when; live while now < expires_at_ms."""

    key: str
    tokens: int
    ttl_class: TtlClass
    ttl_ms: int
    expires_at_ms: int


@dataclass(frozen=True, slots=True)
class PendingEntry:
    """A prefix that a request is about to write, and which gateway process that request is in."""

    key: str
    tokens: int
    request_id: str
    owner_boot_id: str


def find_live(conn: Connection, keys: Sequence[str], *, now_ms: int) -> dict[str, Entry]:
    """The live entries among these keys."""
    rows = conn.execute(
        select(cache_entries)
        .where(cache_entries.c.entry_key.in_(keys), _live, cache_entries.c.expires_at_ms > now_ms)
        .order_by(cache_entries.c.expires_at_ms)  # the longest-lived of a key comes last and stays
    )
    return {
        row.entry_key: Entry(
            row.entry_key, row.tokens, row.ttl_class, row.ttl_ms, row.expires_at_ms
        )
        for row in rows
    }


def find_pending(
    conn: Connection, keys: Sequence[str], *, started_at_ms: int, now_ms: int
) -> list[PendingEntry]:
    """The pending entries among these keys that a request which started then may wait for.

    Not those that would have expired before its start, nor those whose deadline has passed: their
    writer may be dead.
    """
    rows = conn.execute(
        select(cache_entries, holds.c.owner_boot_id)
        .join(holds, holds.c.request_id == cache_entries.c.request_id)
        .where(
            cache_entries.c.entry_key.in_(keys),
            cache_entries.c.state == "pending",
            cache_entries.c.expires_at_ms > started_at_ms,
            cache_entries.c.awaited_until_ms > now_ms,
        )
    )
    return [
        PendingEntry(row.entry_key, row.tokens, row.request_id, row.owner_boot_id) for row in rows
    ]


def write_pending(
    conn: Connection,
    request_id: str,
    writes: Sequence[WritePoint],
    *,
    ttl_ms: Mapping[TtlClass, int],
    started_at_ms: int,
    awaited_until_ms: int | None,
) -> None:
    """Note what a request will write; the lifetime counts from the request's start."""
    if not writes:
        return
    conn.execute(
        insert(cache_entries),
        [
            {
                "entry_key": write.entry_key,
                "request_id": request_id,
                "tokens": write.tokens,
                "ttl_class": write.ttl_class,
                "ttl_ms": ttl_ms[write.ttl_class],
                "state": "pending",
                "expires_at_ms": started_at_ms + ttl_ms[write.ttl_class],
                "awaited_until_ms": awaited_until_ms,
            }
            for write in writes
        ],
    )


def refresh(conn: Connection, keys: Collection[str], *, started_at_ms: int) -> None:
    """A read renews an entry for its own class, from the reader's start; it never shortens one."""
    if not keys:
        return
    renewed = cache_entries.c.ttl_ms + started_at_ms
    conn.execute(
        update(cache_entries)
        .where(
            cache_entries.c.entry_key.in_(keys),
            _live,
            cache_entries.c.expires_at_ms > started_at_ms,
            cache_entries.c.expires_at_ms < renewed,
        )
        .values(expires_at_ms=renewed)
    )


def activate(conn: Connection, *, request_id: str, tokens: int) -> None:
    """The engine has committed this prefix, so others may read it; idempotent."""
    conn.execute(
        update(cache_entries)
        .where(_of(request_id), cache_entries.c.tokens == tokens)
        .values(state="live")
    )


def remove_unpaid(conn: Connection, request_id: str, *, paid: Sequence[WritePoint]) -> None:
    """Take back what a request wrote, or meant to write, and does not pay for."""
    keys = [write.entry_key for write in paid]
    conn.execute(
        delete(cache_entries).where(_of(request_id), cache_entries.c.entry_key.not_in(keys))
    )


def sweep(conn: Connection, *, now_ms: int) -> int:
    """Delete expired entries; answers how many. A pending one is left to its request's end."""
    expired = delete(cache_entries).where(_live, cache_entries.c.expires_at_ms <= now_ms)
    return conn.execute(expired).rowcount


def _of(request_id: str) -> ColumnElement[bool]:
    return cache_entries.c.request_id == request_id
