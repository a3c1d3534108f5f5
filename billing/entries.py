"""Cache entries: promises to bill a prefix at the read price until they expire.

A row belongs to the request that writes it: `pending` from its hold on, `live` once the engine has
committed the prefix. Another request may wait for a pending entry until the deadline in its row.
Requests that do not wait write the same key too. Each pays, so each has its own row, and a reader
gets the row of the key that expires last. So neither a later, shorter write nor the failure of one
writer removes what another has paid for.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from sqlalchemy import ColumnElement, Connection, delete, insert, select, tuple_, update

from billing.meters import TtlClass, WritePoint
from billing.tables import cache_entries, holds

# A request reads what was live at its start, but may look it up this much later, after waiting for
# the engine or the writer.
SWEEP_GRACE_MS = 120_000

# Entries in one piece of a sweep: a few milliseconds of the write lock.
SWEEP_MAX = 1_000

_live = cache_entries.c.state == "live"

# Keys in one statement: SQLite accepts 32,766 parameters, PostgreSQL 65,535.
KEYS_A_STATEMENT = 10_000


@dataclass(frozen=True, slots=True)
class Entry:
    """A live entry for a prefix of exactly `num_tokens` tokens; live while now < expires_at_ms."""

    key: str
    num_tokens: int
    ttl_class: TtlClass
    ttl_ms: int
    expires_at_ms: int


@dataclass(frozen=True, slots=True)
class Renewal:
    """A row whose expiry a read moved from `expired_at_ms` to `expires_at_ms`."""

    key: str
    request_id: str
    expired_at_ms: int
    expires_at_ms: int


@dataclass(frozen=True, slots=True)
class PendingEntry:
    """A prefix that a request is about to write, and the gateway process of that request."""

    key: str
    num_tokens: int
    request_id: str
    owner_boot_id: str


def find_live(conn: Connection, keys: Sequence[str], *, now_ms: int) -> dict[str, Entry]:
    """Return the live entries among these keys; there may be any number of keys."""
    live = select(cache_entries).where(_live, cache_entries.c.expires_at_ms > now_ms)
    by_expiry = live.order_by(cache_entries.c.expires_at_ms)  # of a key, the last row stays
    return {
        row.entry_key: Entry(
            row.entry_key, row.tokens, row.ttl_class, row.ttl_ms, row.expires_at_ms
        )
        for some in _chunks(keys)
        for row in conn.execute(by_expiry.where(cache_entries.c.entry_key.in_(some)))
    }


def find_pending(
    conn: Connection, keys: Sequence[str], *, started_at_ms: int, now_ms: int
) -> list[PendingEntry]:
    """Return the pending entries among these keys that a request may wait for.

    The request started at `started_at_ms`. Left out are entries that expire before that, and those
    whose deadline has passed: their writer may be dead.
    """
    awaited = (
        select(cache_entries, holds.c.owner_boot_id)
        .join(holds, holds.c.request_id == cache_entries.c.request_id)
        .where(
            cache_entries.c.state == "pending",
            cache_entries.c.expires_at_ms > started_at_ms,
            cache_entries.c.awaited_until_ms > now_ms,
        )
    )
    return [
        PendingEntry(row.entry_key, row.tokens, row.request_id, row.owner_boot_id)
        for some in _chunks(keys)
        for row in conn.execute(awaited.where(cache_entries.c.entry_key.in_(some)))
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
    """Insert the pending entries of a request; their lifetime counts from the request's start."""
    if not writes:
        return
    conn.execute(
        insert(cache_entries),
        [
            {
                "entry_key": write.entry_key,
                "request_id": request_id,
                "tokens": write.num_tokens,
                "ttl_class": write.ttl_class,
                "ttl_ms": ttl_ms[write.ttl_class],
                "state": "pending",
                "expires_at_ms": started_at_ms + ttl_ms[write.ttl_class],
                "awaited_until_ms": awaited_until_ms,
            }
            for write in writes
        ],
    )


def renew(conn: Connection, keys: Collection[str], *, started_at_ms: int) -> tuple[Renewal, ...]:
    """Renew the live entries that an admitted request reads; return what was renewed.

    An entry gets its own TTL again, from the reader's start. A renewal never shortens a lifetime.
    """
    renewed_at_ms = cache_entries.c.ttl_ms + started_at_ms
    due = select(cache_entries).where(
        _live,
        cache_entries.c.expires_at_ms > started_at_ms,
        cache_entries.c.expires_at_ms < renewed_at_ms,
    )
    renewals = tuple(
        Renewal(row.entry_key, row.request_id, row.expires_at_ms, row.ttl_ms + started_at_ms)
        for some in _chunks(keys)
        for row in conn.execute(due.where(cache_entries.c.entry_key.in_(some)))
    )
    for renewal in renewals:
        _move_expiry(conn, renewal, renewal.expired_at_ms, renewal.expires_at_ms)
    return renewals


def withdraw_renewals(conn: Connection, renewals: Sequence[Renewal]) -> None:
    """Take back the renewals of a request that turned out free; later ones of others stay."""
    for renewal in renewals:
        _move_expiry(conn, renewal, renewal.expires_at_ms, renewal.expired_at_ms)


def activate(conn: Connection, *, request_id: str, num_tokens: int) -> None:
    """Make a request's entry live: the engine has committed this prefix. Idempotent."""
    conn.execute(
        update(cache_entries)
        .where(_of(request_id), cache_entries.c.tokens == num_tokens)
        .values(state="live")
    )


def remove_unpaid(conn: Connection, request_id: str, *, paid: Sequence[WritePoint]) -> None:
    """Delete a request's entries, pending or live, for writes that it does not pay for."""
    keys = [write.entry_key for write in paid]
    conn.execute(
        delete(cache_entries).where(_of(request_id), cache_entries.c.entry_key.not_in(keys))
    )


def sweep(conn: Connection, *, now_ms: int, num_max: int = SWEEP_MAX) -> int:
    """Delete up to `num_max` entries that expired at least SWEEP_GRACE_MS ago; return how many.

    If it is fewer than `num_max`, none is left. Otherwise the caller repeats, each time in a new
    transaction, so that requests can write in between. Pending entries stay: the end of their
    request deletes them.
    """
    key = (cache_entries.c.entry_key, cache_entries.c.request_id)
    expired = (
        select(*key)
        .where(_live, cache_entries.c.expires_at_ms <= now_ms - SWEEP_GRACE_MS)
        .order_by(cache_entries.c.expires_at_ms)
        .limit(num_max)
    )
    return conn.execute(delete(cache_entries).where(tuple_(*key).in_(expired))).rowcount


def _move_expiry(conn: Connection, renewal: Renewal, from_ms: int, to_ms: int) -> None:
    conn.execute(
        update(cache_entries)
        .where(
            _of(renewal.request_id),
            cache_entries.c.entry_key == renewal.key,
            cache_entries.c.expires_at_ms == from_ms,
        )
        .values(expires_at_ms=to_ms)
    )


def _chunks(keys: Collection[str]) -> Iterator[tuple[str, ...]]:
    """Yield each key once, as many at a time as one statement accepts."""
    distinct = iter(dict.fromkeys(keys))  # a key in one chunk only: its rows stay together
    while some := tuple(islice(distinct, KEYS_A_STATEMENT)):
        yield some


def _of(request_id: str) -> ColumnElement[bool]:
    return cache_entries.c.request_id == request_id
