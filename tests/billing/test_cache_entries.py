"""Cache entries: pending, live, renewed, expired to the millisecond, and never shortened."""

from typing import Any

import pytest
from sqlalchemy import Connection, event

from billing.database import Database
from billing.entries import (
    SWEEP_GRACE_MS,
    Entry,
    PendingEntry,
    activate,
    find_live,
    find_pending,
    renew,
    sweep,
)
from billing.facts import GrantFact
from billing.holds import Hold
from billing.meters import WritePoint
from tests.billing.books import NOW_MS, TTL_MS, Books, make_books

SHORT = WritePoint(8, "5m", "key-8")
LONG = WritePoint(8, "1h", "key-8")
END_MS = NOW_MS + TTL_MS["5m"]


@pytest.fixture
def books(database: Database) -> Books:
    return make_books(database)


def live(books: Books, *keys: str, at_ms: int = NOW_MS) -> dict[str, Entry]:
    return books.database.read_now(lambda conn: find_live(conn, keys or ["key-8"], now_ms=at_ms))


def commit(books: Books, hold: Hold, num_tokens: int = 8) -> None:
    books.database.write_now(
        lambda conn: activate(conn, request_id=hold.request_id, num_tokens=num_tokens)
    )


def test_an_entry_is_live_from_its_commit_until_exactly_its_expiry(books: Books) -> None:
    hold = books.open(writes=(SHORT,))
    assert live(books) == {}

    commit(books, hold)

    assert live(books) == {"key-8": Entry("key-8", 8, "5m", TTL_MS["5m"], END_MS)}
    assert live(books, at_ms=END_MS - 1) != {}
    assert live(books, at_ms=END_MS) == {}


def test_committing_again_and_settling_change_nothing(books: Books) -> None:
    hold = books.open(writes=(SHORT,))
    commit(books, hold)
    before = live(books)

    commit(books, hold)
    books.settle(hold)
    commit(books, hold)

    assert live(books) == before


def test_settlement_makes_committed_writes_live_and_removes_the_rest(books: Books) -> None:
    hold = books.open(writes=(WritePoint(4, "1h", "key-4"), SHORT))

    books.settle(
        hold,
        grants=(GrantFact(4, True, "granted", committed=True), GrantFact(8, True, "granted")),
    )

    assert set(live(books, "key-4", "key-8")) == {"key-4"}
    commit(books, hold)
    assert set(live(books, "key-4", "key-8")) == {"key-4"}


def test_what_a_failed_request_wrote_is_gone(books: Books) -> None:
    hold = books.open(writes=(SHORT,))
    commit(books, hold)

    books.settle(hold, finish_reason="error", output_tokens=0)

    assert live(books) == {}


def test_a_failed_writer_does_not_take_what_another_paid_for(books: Books) -> None:
    first = books.open(writes=(SHORT,))
    second = books.open(writes=(SHORT,), started_at_ms=NOW_MS + 1_000)
    commit(books, first)
    commit(books, second)
    assert live(books)["key-8"].expires_at_ms == END_MS + 1_000
    books.settle(first)

    books.settle(second, finish_reason="error", output_tokens=0)

    assert live(books)["key-8"].expires_at_ms == END_MS


@pytest.mark.parametrize("order", [(LONG, SHORT), (SHORT, LONG)])
def test_of_two_writers_the_longer_promise_is_read(
    books: Books, order: tuple[WritePoint, WritePoint]
) -> None:
    for write in order:
        books.settle(books.open(writes=(write,)))

    assert live(books)["key-8"].ttl_class == "1h"


def test_a_read_renews_in_the_entry_s_own_class_from_its_start(books: Books) -> None:
    books.settle(books.open(writes=(LONG,)))

    books.open(renewed=["key-8"], started_at_ms=NOW_MS + 50)

    assert live(books)["key-8"].expires_at_ms == NOW_MS + 50 + TTL_MS["1h"]


def test_a_read_that_started_earlier_shortens_nothing(books: Books) -> None:
    books.settle(books.open(writes=(SHORT,)))

    books.open(renewed=["key-8"], started_at_ms=NOW_MS - 50)

    assert live(books)["key-8"].expires_at_ms == END_MS


def test_an_expired_or_pending_entry_is_not_renewed(books: Books) -> None:
    books.settle(books.open(writes=(SHORT,)))
    books.open(writes=(WritePoint(9, "5m", "key-9"),))

    books.open(renewed=["key-8", "key-9"], started_at_ms=END_MS)

    assert live(books, "key-8", "key-9", at_ms=END_MS) == {}


def test_sweeping_deletes_the_expired_and_nothing_else(books: Books) -> None:
    books.settle(books.open(writes=(SHORT,)))
    books.settle(books.open(writes=(WritePoint(9, "1h", "key-9"),)))
    running = books.open(writes=(WritePoint(10, "5m", "key-10"),))

    swept = books.database.write_now(lambda conn: sweep(conn, now_ms=END_MS + SWEEP_GRACE_MS))

    assert swept == 1
    assert set(live(books, "key-8", "key-9")) == {"key-9"}
    commit(books, running, num_tokens=10)
    assert set(live(books, "key-10")) == {"key-10"}


def test_a_sweep_goes_in_pieces_oldest_first_until_one_is_not_full(books: Books) -> None:
    for number in range(5):
        started_at_ms = NOW_MS + 4 - number
        writes = (WritePoint(8, "5m", f"key-{number}"),)
        books.settle(books.open(writes=writes, started_at_ms=started_at_ms))
    late_ms = END_MS + SWEEP_GRACE_MS + 1_000

    def sweep_two() -> int:
        return books.database.write_now(lambda conn: sweep(conn, now_ms=late_ms, num_max=2))

    assert sweep_two() == 2
    assert set(live(books, *(f"key-{number}" for number in range(5)))) == {
        "key-0",
        "key-1",
        "key-2",
    }
    assert [sweep_two(), sweep_two(), sweep_two()] == [2, 1, 0]


def test_a_path_of_forty_thousand_keys_is_looked_up_and_renewed(books: Books) -> None:
    path = [f"key-{number}" for number in range(40_000)]
    written = (path[0], path[20_000], path[-1])
    for key in written:
        books.settle(books.open(writes=(WritePoint(8, "5m", key),)))
    books.settle(books.open(writes=(WritePoint(8, "1h", path[0]),)))  # a longer promise, far away

    def read(conn: Connection) -> dict[str, Entry]:
        event.listen(conn, "before_cursor_execute", require_few_parameters)
        return find_live(conn, [*path, path[0]], now_ms=NOW_MS)

    def renew_path(conn: Connection) -> None:
        event.listen(conn, "before_cursor_execute", require_few_parameters)
        renew(conn, path, started_at_ms=NOW_MS + 50)

    assert set(books.database.read_now(read)) == set(written)
    books.database.write_now(renew_path)
    assert {key: entry.expires_at_ms for key, entry in books.database.read_now(read).items()} == {
        path[0]: NOW_MS + 50 + TTL_MS["1h"],
        path[20_000]: END_MS + 50,
        path[-1]: END_MS + 50,
    }


def require_few_parameters(_conn: Any, _cursor: Any, _sql: str, parameters: Any, *_: Any) -> None:
    """SQLite as it is usually built takes 32,766 in one statement; some builds take more."""
    assert len(parameters) <= 32_766


def test_an_expired_entry_is_swept_when_no_request_from_its_lifetime_can_still_come(
    books: Books,
) -> None:
    books.settle(books.open(writes=(SHORT,)))

    books.database.write_now(lambda conn: sweep(conn, now_ms=END_MS + SWEEP_GRACE_MS - 1))
    assert live(books, at_ms=END_MS - 1) != {}

    books.database.write_now(lambda conn: sweep(conn, now_ms=END_MS + SWEEP_GRACE_MS))
    assert live(books, at_ms=END_MS - 1) == {}


def test_no_keys_find_nothing(books: Books) -> None:
    assert books.database.read_now(lambda conn: find_live(conn, [], now_ms=NOW_MS)) == {}


def pending(
    books: Books, *keys: str, started_at_ms: int = NOW_MS, now_ms: int = NOW_MS
) -> set[str]:
    found = books.database.read_now(
        lambda conn: find_pending(conn, keys, started_at_ms=started_at_ms, now_ms=now_ms)
    )
    return {entry.key for entry in found}


def test_a_pending_entry_is_awaited_until_its_deadline_and_names_its_writer(books: Books) -> None:
    hold = books.open(writes=(SHORT,), awaited_until_ms=NOW_MS + 90)

    before, at = (
        books.database.read_now(
            lambda conn, at_ms=at_ms: find_pending(
                conn, ["key-8"], started_at_ms=NOW_MS, now_ms=at_ms
            )
        )
        for at_ms in (NOW_MS + 89, NOW_MS + 90)
    )

    assert before == [PendingEntry("key-8", 8, hold.request_id, hold.owner_boot_id)]
    assert at == []


def test_nobody_waits_for_what_is_live_or_gone_or_expires_before_it_can_be_read(
    books: Books,
) -> None:
    late_ms = NOW_MS + 10 * TTL_MS["1h"]
    writes = tuple(WritePoint(n, "5m", f"key-{n}") for n in (4, 8))
    hold = books.open(writes=writes, awaited_until_ms=late_ms)
    assert pending(books, "key-4", "key-8", "key-9") == {"key-4", "key-8"}
    assert pending(books, "key-4", "key-8", started_at_ms=END_MS) == set()

    commit(books, hold, num_tokens=4)
    assert pending(books, "key-4", "key-8") == {"key-8"}

    books.settle(hold, grants=(GrantFact(4, True, "granted", committed=True),))
    assert pending(books, "key-4", "key-8") == set()


def test_an_entry_without_a_deadline_is_not_awaited(books: Books) -> None:
    books.open(writes=(SHORT,))

    assert pending(books, "key-8") == set()
