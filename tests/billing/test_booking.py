"""Bookings are stamped where they are committed, in order, and a closed period stays closed."""

import threading
from collections.abc import Callable, Iterator
from importlib import import_module

import pytest
from sqlalchemy import Connection, select
from sqlalchemy.exc import IntegrityError

from billing.booking import close_period, last_booked_at_ms
from billing.database import Database
from billing.ledger import top_up
from billing.reports import usage
from billing.settlement import release, settle
from billing.tables import holds, requests, transfers
from tests.billing.books import NOW_MS, OWNER, Books, engine_facts, make_books

MONTH_END_MS = NOW_MS + 5_000


class Now:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.ms = NOW_MS

    def __call__(self) -> int:
        return self.ms


@pytest.fixture
def now() -> Now:
    return Now()


@pytest.fixture
def books(database_url: str, now: Callable[[], int]) -> Iterator[Books]:
    database = Database(database_url, now_ms=now)
    yield make_books(database)
    database.close()


def settle_at(books: Books, request_id: str, hold: object, ended_at_ms: int) -> None:
    books.database.write_now(
        lambda conn: settle(
            conn,
            request_id=request_id,
            owner_boot_id=OWNER,
            facts=engine_facts(hold),
            ended_at_ms=ended_at_ms,
            stop_reason="end_turn",
        )
    )


def booked(books: Books, request_id: str) -> set[int]:
    """When a request's transfers, and the close of its hold, were booked."""
    of_transfers = select(transfers.c.booked_at_ms).where(transfers.c.request_id == request_id)
    of_hold = select(holds.c.closed_at_ms).where(holds.c.request_id == request_id)
    return set(
        books.database.read_now(lambda conn: conn.scalars(of_transfers.union(of_hold)).all())
    )


def test_a_booking_is_stamped_when_it_is_written_not_when_it_happened(
    books: Books, now: Now
) -> None:
    hold = books.open()
    now.ms = NOW_MS + 60_000

    settle_at(books, hold.request_id, hold, NOW_MS + 5)

    assert booked(books, hold.request_id) == {NOW_MS + 60_000}
    effective = books.database.read_now(
        lambda conn: set(conn.scalars(select(transfers.c.effective_at_ms)))
    )
    assert effective == {NOW_MS + 5}


def test_a_booking_that_waits_for_the_lock_is_stamped_after_the_wait(
    books: Books, now: Now
) -> None:
    hold, started, go_on = books.open(), threading.Event(), threading.Event()

    def blocks(_conn: object) -> None:
        started.set()
        assert go_on.wait(10)

    blocking = threading.Thread(target=books.database.write_now, args=(blocks,))
    blocking.start()
    assert started.wait(10)
    settling = threading.Thread(
        target=settle_at, args=(books, hold.request_id, hold, MONTH_END_MS - 1)
    )
    settling.start()
    now.ms = MONTH_END_MS + 1
    go_on.set()
    for thread in (blocking, settling):
        thread.join(10)

    assert booked(books, hold.request_id) == {MONTH_END_MS + 1}


def test_no_booking_is_before_an_earlier_one(books: Books, database: Database, now: Now) -> None:
    first, second = books.open(), books.open()
    now.ms = NOW_MS + 9_000
    settle_at(books, first.request_id, first, NOW_MS + 1)
    behind = Books(database, books.organization_id)  # another gateway, whose clock is behind

    settle_at(behind, second.request_id, second, NOW_MS + 2)

    assert booked(books, second.request_id) == {NOW_MS + 9_000}


def test_a_release_and_a_top_up_are_stamped_likewise(books: Books, now: Now) -> None:
    prepaid = make_books(books.database, "prepaid", "org_b")
    hold = books.open()
    now.ms = NOW_MS + 9_000

    books.database.write_now(
        lambda conn: release(
            conn, request_id=hold.request_id, owner_boot_id=OWNER, reason="full", ended_at_ms=NOW_MS
        )
    )
    books.database.write_now(
        lambda conn: top_up(
            conn, organization_id=prepaid.organization_id, amount_nanos=1, transfer_id="txn_x",
            now_ms=NOW_MS,
        )
    )  # fmt: skip

    assert booked(books, hold.request_id) == {NOW_MS + 9_000}
    stamped = books.database.read_now(lambda conn: conn.scalar(select(transfers.c.booked_at_ms)))
    assert stamped == NOW_MS + 9_000


def test_a_closed_period_has_the_same_report_for_ever(books: Books, now: Now) -> None:
    def january() -> list[object]:
        return books.database.read_now(lambda conn: usage(conn, until_ms=MONTH_END_MS))

    early, late = books.open(), books.open()
    settle_at(books, early.request_id, early, MONTH_END_MS - 2)
    books.database.write_now(lambda conn: close_period(conn, until_ms=MONTH_END_MS))
    reported = january()

    settle_at(books, late.request_id, late, MONTH_END_MS - 1)  # it ended before, and `now` is too

    assert january() == reported
    assert booked(books, late.request_id) == {MONTH_END_MS}
    assert books.database.read_now(last_booked_at_ms) == MONTH_END_MS


def test_an_end_by_a_clock_that_is_behind_is_not_before_the_start(books: Books) -> None:
    hold = books.open()

    settle_at(books, hold.request_id, hold, NOW_MS - 3_600_000)

    row = books.database.read_now(lambda conn: conn.execute(select(requests)).one())
    assert (row.started_at_ms, row.ended_at_ms) == (NOW_MS, NOW_MS)
    books.assert_sound()


def test_the_database_refuses_an_end_before_the_start(books: Books) -> None:
    hold = books.open()
    settle_at(books, hold.request_id, hold, NOW_MS + 1)
    books.open(request_id="req_x")
    columns = [column.name for column in requests.c if column.name not in ("id", "ended_at_ms")]
    early = (
        f"INSERT INTO requests (id, ended_at_ms, {', '.join(columns)})"
        f" SELECT 'req_x', started_at_ms - 1, {', '.join(columns)} FROM requests"
    )

    with pytest.raises(IntegrityError, match="end after their start"):
        books.database.write_now(lambda conn: conn.exec_driver_sql(early))


def test_the_booking_clock_of_an_older_database_begins_at_its_last_booking(books: Books) -> None:
    hold = books.open()
    settle_at(books, hold.request_id, hold, NOW_MS + 7_000)
    migration = import_module("migrations.versions.0004_bookings_and_decisions")

    def begin_again(conn: Connection) -> None:
        conn.exec_driver_sql("DELETE FROM booking_clock")
        conn.exec_driver_sql(migration.FIRST_ROW)

    books.database.write_now(begin_again)

    assert books.database.read_now(last_booked_at_ms) == NOW_MS + 7_000
