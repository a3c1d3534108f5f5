"""The group-commit writer: shared commits, separate failures, whole retries, an orderly end."""

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta

import psycopg
import pytest
from sqlalchemy import Connection, Engine, event, func, insert, select, text
from sqlalchemy.exc import DBAPIError, IntegrityError

from billing import database as databases
from billing.database import Database
from billing.errors import WriteGivenUp, WriterUnavailable
from billing.holds import find_hold, open_hold
from billing.tables import outbox
from billing.writer import BACKLOG_MAX, BATCH_MAX, Writer, is_conflict
from tests.billing.books import TTL_MS, make_books, no_clock


def enqueue(name: str) -> Callable[[Connection], str]:
    def write(conn: Connection) -> str:
        conn.execute(insert(outbox).values(id=name, topic="t", payload="{}", created_at_ms=1))
        return name

    return write


def count_rows(conn: Connection) -> int:
    return conn.scalar(select(func.count()).select_from(outbox)) or 0


class Blocked:
    """Keeps a writer busy with one operation until released, so that others gather behind it."""

    def __init__(self, writer: Writer) -> None:
        self._started, self._go_on = threading.Event(), threading.Event()
        self.future: Future[None] = writer.submit(self._wait)
        assert self._started.wait(10)

    def _wait(self, _conn: Connection) -> None:
        self._started.set()
        assert self._go_on.wait(10)

    def release(self) -> None:
        self._go_on.set()


@pytest.fixture
def engine(database_url: str) -> Engine:
    return databases.writing_engine(databases.database_url(database_url))


@pytest.fixture
def writer(engine: Engine) -> Iterator[Writer]:
    writer = Writer(engine)
    yield writer
    writer.close()


def test_operations_that_wait_share_a_commit(
    database: Database, engine: Engine, writer: Writer
) -> None:
    commits: list[Connection] = []
    event.listen(engine, "commit", commits.append)
    blocked = Blocked(writer)
    futures = [writer.submit(enqueue(f"row {number}")) for number in range(BATCH_MAX)]

    blocked.release()

    assert [future.result(10) for future in futures] == [f"row {n}" for n in range(BATCH_MAX)]
    assert len(commits) == 2
    assert database.read_now(count_rows) == BATCH_MAX


def test_a_failing_operation_is_undone_alone(database: Database, writer: Writer) -> None:
    def half_then_fail(conn: Connection) -> None:
        enqueue("half")(conn)
        raise LookupError("changed my mind")

    blocked = Blocked(writer)
    good, bad, twice, last = (
        writer.submit(operation)
        for operation in (enqueue("a"), half_then_fail, enqueue("a"), enqueue("b"))
    )
    blocked.release()

    assert (good.result(10), last.result(10)) == ("a", "b")
    with pytest.raises(LookupError, match="changed my mind"):
        bad.result(10)
    with pytest.raises(IntegrityError):
        twice.result(10)
    assert database.read_now(count_rows) == 2


def test_a_read_from_asyncio_sees_what_a_write_from_asyncio_committed(database: Database) -> None:
    async def write_and_read() -> int:
        await database.write(enqueue("a"))
        return await database.read(count_rows)

    assert asyncio.run(write_and_read()) == 1


def test_a_result_is_durable_when_it_arrives(database: Database) -> None:
    database.write_now(enqueue("a"))

    assert database.read_now(count_rows) == 1


@pytest.mark.parametrize("cause", ["40001", "40P01", "SQLITE_BUSY"])
def test_a_conflict_runs_the_whole_batch_again(
    database: Database, writer: Writer, cause: str
) -> None:
    attempts = []

    def conflicts_twice(conn: Connection) -> int:
        attempts.append(count_rows(conn))
        if len(attempts) < 3:
            raise transient(cause)
        return len(attempts)

    blocked = Blocked(writer)
    first, second = writer.submit(enqueue("a")), writer.submit(conflicts_twice)
    blocked.release()

    assert (first.result(10), second.result(10)) == ("a", 3)
    assert attempts == [1, 1, 1]  # each attempt saw the first operation's row, once
    assert database.read_now(count_rows) == 1


def test_a_conflict_without_end_reaches_the_callers(writer: Writer) -> None:
    def always(_conn: Connection) -> None:
        raise transient("40001")

    with pytest.raises(DBAPIError):
        writer.submit(always).result(10)

    assert writer.submit(enqueue("after")).result(10) == "after"


def transient(cause: str) -> DBAPIError:
    if cause == "SQLITE_BUSY":
        error: Exception = sqlite3.OperationalError("database is locked")
        error.sqlite_errorcode = sqlite3.SQLITE_BUSY_SNAPSHOT  # type: ignore[attr-defined]
    else:
        error = psycopg.errors.lookup(cause)("conflict")
    return DBAPIError("statement", {}, error)


def test_a_broken_rule_is_not_a_conflict() -> None:
    assert not is_conflict(ValueError())
    assert not is_conflict(IntegrityError("s", {}, psycopg.errors.UniqueViolation()))
    assert is_conflict(transient("40P01"))


def test_a_caller_cancelled_while_waiting_writes_nothing(
    database: Database, writer: Writer
) -> None:
    blocked = Blocked(writer)
    cancelled, kept = writer.submit(enqueue("a")), writer.submit(enqueue("b"))
    assert cancelled.cancel()

    blocked.release()

    assert kept.result(10) == "b"
    assert database.read_now(count_rows) == 1


def test_a_cancelled_operation_alone_does_not_end_the_writer(
    database: Database, writer: Writer
) -> None:
    blocked = Blocked(writer)
    assert writer.submit(enqueue("a")).cancel()
    blocked.release()
    blocked.future.result(10)

    assert writer.submit(enqueue("b")).result(10) == "b"
    assert database.read_now(count_rows) == 1


def test_closing_writes_a_batch_that_is_not_full(database: Database, writer: Writer) -> None:
    blocked = Blocked(writer)
    future = writer.submit(enqueue("a"))
    closing = threading.Thread(target=writer.close)
    closing.start()
    while writer._jobs.qsize() < 2:  # the operation and the closing mark behind it
        time.sleep(0.001)

    blocked.release()
    closing.join(10)

    assert future.result(0) == "a"
    assert database.read_now(count_rows) == 1


def test_cancelling_a_task_whose_operation_runs_does_not_stop_it(database: Database) -> None:
    started, go_on = threading.Event(), threading.Event()

    def slow(conn: Connection) -> None:
        started.set()
        assert go_on.wait(10)
        enqueue("a")(conn)

    async def cancel_late() -> None:
        task = asyncio.create_task(database.write(slow))
        await asyncio.to_thread(started.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()
        await database.write(enqueue("b"))

    asyncio.run(cancel_late())

    assert database.read_now(count_rows) == 2


@contextmanager
def locked(url: str) -> Iterator[None]:
    """Hold the database's write lock, as another process's transaction does."""
    other = databases.writing_engine(databases.database_url(url))
    with other.begin():
        yield
    other.dispose()


def test_a_write_given_up_under_a_lock_never_happens(database: Database, database_url: str) -> None:
    async def give_up() -> None:
        with pytest.raises(WriteGivenUp):
            await database.write(enqueue("given up"), begin_within=timedelta(milliseconds=50))

    with locked(database_url):
        asyncio.run(give_up())
    database.write_now(enqueue("after"))

    assert database.read_now(ids) == ["after"]


def test_a_hold_given_up_under_a_lock_reserves_nothing(
    database: Database, database_url: str
) -> None:
    books = make_books(database, "prepaid")
    hold = books.hold(amount_nanos=0)

    async def give_up() -> None:
        with pytest.raises(WriteGivenUp):
            await database.write(
                lambda conn: open_hold(conn, hold, ttl_ms=TTL_MS),
                begin_within=timedelta(milliseconds=50),
            )

    with locked(database_url):
        asyncio.run(give_up())
    database.write_now(enqueue("after"))

    assert database.read_now(lambda conn: find_hold(conn, hold.request_id)) is None


def test_a_task_cancelled_under_a_lock_writes_nothing(
    database: Database, database_url: str
) -> None:
    async def cancel() -> None:
        task = asyncio.create_task(database.write(enqueue("cancelled")))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with locked(database_url):
        asyncio.run(cancel())
    database.write_now(enqueue("after"))

    assert database.read_now(ids) == ["after"]


def test_a_write_that_has_begun_is_waited_for(database: Database, writer: Writer) -> None:
    started, go_on = threading.Event(), threading.Event()

    def slow(conn: Connection) -> str:
        started.set()
        assert go_on.wait(10)
        return enqueue("a")(conn)

    future = writer.submit(slow)
    assert started.wait(10)
    assert not future.cancel()
    go_on.set()

    assert future.result(10) == "a"
    assert database.read_now(ids) == ["a"]


def test_a_write_undone_by_a_conflict_does_not_begin_again_once_given_up(
    database: Database, writer: Writer
) -> None:
    attempts: list[str] = []
    futures: list[Future[str]] = []

    def is_given_up_then_conflicts(conn: Connection) -> str:
        attempts.append("run")
        enqueue("undone")(conn)
        assert not futures[0].cancel()
        raise transient("40001")

    blocked = Blocked(writer)
    futures.append(writer.submit(is_given_up_then_conflicts))
    kept = writer.submit(enqueue("kept"))
    blocked.release()

    with pytest.raises(WriteGivenUp):
        futures[0].result(10)
    assert kept.result(10) == "kept"
    assert attempts == ["run"]
    assert database.read_now(ids) == ["kept"]


def test_a_lock_that_stays_is_waited_for_a_bounded_time(postgres_url: str) -> None:
    engine = databases.writing_engine(databases.database_url(postgres_url))
    with engine.begin() as conn:
        limits = {name: conn.scalar(text(f"SHOW {name}")) for name in databases.WRITER_TIMEOUTS}
    with engine.connect() as conn:
        conn.execute(text("SELECT 1"))
        parameters = conn.connection.driver_connection.info.get_parameters()
    engine.dispose()

    assert limits == {
        "lock_timeout": "10s",
        "statement_timeout": "15s",
        "idle_in_transaction_session_timeout": "10s",
    }
    assert {
        name: parameters.get(name) for name in databases.CONNECTION_TIMEOUTS if name != "keepalives"
    } == {
        "connect_timeout": "5",
        "tcp_user_timeout": "10000",
        "keepalives_idle": "5",
        "keepalives_interval": "2",
        "keepalives_count": "3",
    }


def test_a_lock_wait_that_timed_out_is_a_conflict_and_tried_again(
    database: Database, writer: Writer
) -> None:
    attempts: list[int] = []

    def finds_a_lock_once(conn: Connection) -> str:
        attempts.append(1)
        if len(attempts) == 1:
            raise transient("55P03")
        return enqueue("a")(conn)

    assert writer.submit(finds_a_lock_once).result(10) == "a"


def ids(conn: Connection) -> list[str]:
    return list(conn.scalars(select(outbox.c.id).order_by(outbox.c.id)))


def test_closing_writes_what_was_submitted_and_refuses_more(
    database: Database, writer: Writer
) -> None:
    blocked = Blocked(writer)
    futures = [writer.submit(enqueue(f"row {number}")) for number in range(2 * BATCH_MAX)]
    closing = threading.Thread(target=writer.close)
    closing.start()

    blocked.release()
    closing.join(10)

    assert all(future.done() for future in futures)
    assert database.read_now(count_rows) == 2 * BATCH_MAX
    with pytest.raises(WriterUnavailable, match="closed"):
        writer.submit(enqueue("late"))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # on purpose
def test_a_writer_that_breaks_tells_everyone_who_waits(database: Database, writer: Writer) -> None:
    def ends_the_thread(_conn: Connection) -> None:
        raise SystemExit

    blocked = Blocked(writer)
    waiting = [writer.submit(operation) for operation in (enqueue("a"), ends_the_thread)]
    blocked.release()

    for future in waiting:
        with pytest.raises(WriterUnavailable, match="stopped"):
            future.result(10)
    with pytest.raises(WriterUnavailable, match="closed"):
        writer.submit(enqueue("b"))
    assert database.read_now(count_rows) == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # on purpose
def test_a_writer_that_breaks_fails_what_is_still_in_its_queue(
    database: Database, writer: Writer
) -> None:
    def ends_the_thread(_conn: Connection) -> None:
        raise SystemExit

    blocked = Blocked(writer)
    futures = [writer.submit(ends_the_thread)]
    futures += [writer.submit(enqueue(f"row {number}")) for number in range(BATCH_MAX + 2)]
    assert futures[-1].cancel()
    blocked.release()

    for future in futures[:-1]:
        with pytest.raises(WriterUnavailable, match="stopped"):
            future.result(10)
    assert database.read_now(count_rows) == 0


def test_a_full_backlog_refuses_and_what_was_queued_is_written(
    database: Database, writer: Writer
) -> None:
    blocked = Blocked(writer)
    futures = [writer.submit(enqueue(f"row {number}")) for number in range(BACKLOG_MAX)]

    with pytest.raises(WriterUnavailable, match="too much to do"):
        writer.submit(enqueue("one too many"))

    for future in futures[3:]:
        assert future.cancel()
    blocked.release()
    assert [future.result(10) for future in futures[:3]] == ["row 0", "row 1", "row 2"]
    writer.close()
    assert database.read_now(count_rows) == 3


def test_a_connection_lost_before_the_commit_is_made_again(postgres_url: str) -> None:
    database = Database(postgres_url, now_ms=no_clock)
    attempts: list[int] = []

    def hangs_up_once(conn: Connection) -> None:
        attempts.append(count_rows(conn))
        enqueue("a")(conn)
        if len(attempts) == 1:
            conn.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))

    database.write_now(hangs_up_once)

    assert attempts == [0, 0]
    assert database.read_now(count_rows) == 1
    database.close()
