"""The database: one writer thread with group commit, and readers that each see one snapshot.

The only file that distinguishes SQLite and PostgreSQL at run time. Billing functions are
synchronous, take a Connection first and never commit; `Database` runs them.
"""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import Any, TypeVar

from sqlalchemy import URL, Connection, Engine, QueuePool, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError

from billing.booking import CLOCK
from billing.errors import DatabaseUnreachable, DatabaseUrlError, WriteGivenUp
from billing.manifest import require_manifest
from billing.schema import one_migrator, require_head, upgrade
from billing.writer import Writer

T = TypeVar("T")
Operation = Callable[[Connection], T]

READERS_MAX = 4  # reports and look-ups at once; each is short

# How long a transaction waits for another process's lock, which is held for one commit. The writer
# then tries again; a caller that cannot wait gives its write up.
LOCK_WAIT_MS = 10_000

# PostgreSQL only. A writer that stalls inside its transaction loses it, and so the lock.
WRITER_TIMEOUTS = {
    "lock_timeout": LOCK_WAIT_MS,
    "statement_timeout": 15_000,
    "idle_in_transaction_session_timeout": 10_000,
}
TAKE_WRITE_LOCK = "pg_advisory_xact_lock(5201309)"  # the key is an arbitrary constant

# A PostgreSQL server that can no longer be reached is noticed within about ten seconds, whether we
# connect, send, or wait for it. The URL may say otherwise.
CONNECTION_TIMEOUTS = {
    "connect_timeout": 5,  # seconds
    "tcp_user_timeout": 10_000,  # milliseconds
    "keepalives": 1,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
}


class Database:
    """A ledger database: `write` and `read` from asyncio, `write_now` and `read_now` elsewhere.

    A write resolves only after its commit. An operation may run twice (after a conflict with
    another process), so it must depend on its connection only.

    now_ms  the clock that stamps bookings, milliseconds since the epoch
    """

    def __init__(self, url: str, *, now_ms: Callable[[], int]) -> None:
        parsed = database_url(url)
        self._reading = reading_engine(parsed)
        self._writer = Writer(writing_engine(parsed).execution_options(**{CLOCK: now_ms}))
        self._readers = ThreadPoolExecutor(READERS_MAX, thread_name_prefix="billing-reader")

    async def write(self, operation: Operation[T], *, begin_within: timedelta | None = None) -> T:
        """Run an operation in the next group commit; its error fails this caller only.

        begin_within  when to give the operation up if it has not begun; None: never

        An operation that was given up is never run, now or later, and raises WriteGivenUp. If the
        caller is cancelled before the operation begins, it is given up as well. One that has begun
        is waited for; `billing/README.md` has the bounds.
        """
        job = self._writer.submit(operation)
        outcome = asyncio.wrap_future(job)
        seconds = None if begin_within is None else begin_within.total_seconds()
        try:
            await asyncio.wait((outcome,), timeout=seconds)
        except asyncio.CancelledError:
            job.cancel()
            raise
        if not outcome.done() and job.cancel():
            raise WriteGivenUp
        return await outcome

    async def read(self, operation: Operation[T]) -> T:
        """Run a read-only operation on one snapshot."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._readers, self.read_now, operation)

    def write_now(self, operation: Operation[T]) -> T:
        """`write` for callers without an event loop."""
        return self._writer.submit(operation).result()

    def read_now(self, operation: Operation[T]) -> T:
        """`read` for callers without an event loop."""
        with self._reading.begin() as conn:
            return operation(conn)

    def require_migrated(self, *, may_be_damaged: bool = False) -> None:
        """Refuse a database whose schema is not the one this code was written for.

        Raises DatabaseUnreachable, DatabaseNotMigrated or, unless it may be damaged, SchemaDamaged.
        """
        _require_reachable(self._reading)
        self.read_now(require_head)
        if not may_be_damaged:
            self.read_now(require_manifest)

    def close(self) -> None:
        """Commit what was submitted, then close the threads and connections."""
        self._writer.close()
        self._readers.shutdown()
        self._reading.dispose()


def migrate(url: str) -> None:
    """Migrate the database to the newest schema; several processes may do this at once.

    Raises DatabaseUrlError or DatabaseUnreachable.
    """
    parsed = database_url(url)
    engine = writing_engine(parsed, is_bounded=False)
    try:
        with one_migrator(str(parsed.database)) if is_sqlite(parsed) else nullcontext():
            _require_reachable(engine)
            with engine.begin() as conn:
                upgrade(conn)
                require_manifest(conn)
    finally:
        engine.dispose()


def is_sqlite(url: URL) -> bool:
    """Whether the URL names a SQLite file; otherwise it is PostgreSQL."""
    return url.drivername == "sqlite"


def database_url(url: str) -> URL:
    """Return the URL with its driver chosen. Raises DatabaseUrlError if it cannot be used."""
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise DatabaseUrlError("it is not of the form sqlite:///PATH or postgresql://…") from None
    match parsed.drivername:
        case "sqlite" if parsed.database and parsed.database != ":memory:":
            return parsed
        case "sqlite":
            raise DatabaseUrlError("SQLite needs a file, sqlite:///PATH")
        case "postgresql" | "postgres" | "postgresql+psycopg":
            return parsed.set(drivername="postgresql+psycopg")
        case other:
            raise DatabaseUrlError(f"only sqlite and postgresql are known, not {other}")


def writing_engine(url: URL, *, is_bounded: bool = True) -> Engine:
    """Return an engine with one connection, whose transactions exclude other processes' writes.

    `is_bounded` limits lock waits and statements on PostgreSQL; a migration may take longer.

    SQLite has one write lock a database. On PostgreSQL an advisory lock does the same: every
    settlement updates the same few revenue rows, so two batches that lock them in different orders
    would deadlock, which PostgreSQL detects only after a second.
    """
    pool: dict[str, Any] = {"poolclass": QueuePool, "pool_size": 1, "max_overflow": 0}
    if is_sqlite(url):
        engine = create_engine(url, **pool)
        _tune_sqlite(engine, begin="BEGIN IMMEDIATE", pragmas=("synchronous = FULL",))
        return engine
    engine = create_engine(url, **pool, pool_pre_ping=True, connect_args=_timeouts(url))

    bounds = [
        f"set_config('{name}', '{milliseconds}', true)"
        for name, milliseconds in WRITER_TIMEOUTS.items()
        if is_bounded
    ]
    beginning = f"SELECT {', '.join([*bounds, TAKE_WRITE_LOCK])}"  # evaluated in this order

    @event.listens_for(engine, "begin")
    def on_begin(conn: Connection) -> None:
        conn.exec_driver_sql(beginning)

    return engine


def reading_engine(url: URL) -> Engine:
    """Return an engine of connections that cannot write and see one snapshot a transaction."""
    pool: dict[str, Any] = {"poolclass": QueuePool, "pool_size": READERS_MAX, "max_overflow": 0}
    if is_sqlite(url):
        engine = create_engine(url, **pool)
        _tune_sqlite(engine, begin="BEGIN", pragmas=("query_only = ON",))
        return engine
    return create_engine(
        url,
        **pool,
        pool_pre_ping=True,
        connect_args=_timeouts(url),
        isolation_level="REPEATABLE READ",
        execution_options={"postgresql_readonly": True},
    )


def _timeouts(url: URL) -> dict[str, int]:
    """Return the connection time-outs that the URL does not set itself."""
    return {name: value for name, value in CONNECTION_TIMEOUTS.items() if name not in url.query}


def _require_reachable(engine: Engine) -> None:
    try:
        engine.connect().close()
    except DBAPIError as error:
        url = engine.url.render_as_string(hide_password=True)
        problem = str(error.orig).strip().partition("\n")[0]
        raise DatabaseUnreachable(url, problem) from error


def _tune_sqlite(engine: Engine, *, begin: str, pragmas: tuple[str, ...]) -> None:
    """Begin transactions ourselves: the driver's deferred ones can lose concurrent updates."""

    @event.listens_for(engine, "do_connect")
    def before_connect(_dialect: object, _record: object, args: Any, _options: object) -> None:
        # SQLite would create the file readable for every user, and its log likewise. O_EXCL,
        # because closing an existing file would drop the locks of this process's connections.
        with suppress(OSError):  # the driver's own error, next, is clearer
            os.close(os.open(args[0], os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))

    @event.listens_for(engine, "connect")
    def on_connect(connection: Any, _record: object) -> None:
        connection.isolation_level = None  # the driver begins nothing by itself
        always = (f"busy_timeout = {LOCK_WAIT_MS}", "journal_mode = WAL", "foreign_keys = ON")
        for pragma in (*always, *pragmas):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def on_begin(conn: Connection) -> None:
        conn.exec_driver_sql(begin)
