"""A request's record: in progress from its hold, and everything about it once it has ended."""

import pytest

from billing.database import Database
from billing.facts import GrantFact, RefusedWrite
from billing.meters import Meter, Quantities, WritePoint
from billing.rating import PricedLine
from billing.records import request_record
from billing.settlement import release
from tests.billing.books import NOW_MS, OWNER, Books, engine_facts, make_books

WRITES = (WritePoint(4, "1h", "key-4"), WritePoint(8, "5m", "key-8"))


@pytest.fixture
def books(database: Database) -> Books:
    return make_books(database)


def test_an_open_hold_is_a_request_in_progress(books: Books) -> None:
    hold = books.open()

    record = books.database.read_now(lambda conn: request_record(conn, hold.request_id))

    assert record is not None
    assert (record.status, record.quantities, record.charged_nanos) == (
        "in_progress", Quantities(), 0,
    )  # fmt: skip
    assert record.ended_at_ms is None


def test_a_settled_request_tells_what_was_billed_and_what_the_engine_did(books: Books) -> None:
    hold = books.open(writes=WRITES, stream=True)
    grants = (
        GrantFact(4, True, "granted", committed=True),
        GrantFact(8, True, "refused", "capacity"),
    )
    changes = {"grants": grants, "overrun_tokens": 2, "reads_by_tier": {"gpu": 0}}

    settlement = books.settle(hold, **changes)
    record = books.database.read_now(lambda conn: request_record(conn, hold.request_id))

    assert record == settlement.record
    assert record.status == "completed"
    assert record.stream is True
    assert record.quantities == Quantities(input=6, cache_write_1h=4, output=5)
    assert record.postings == (
        PricedLine(Meter.INPUT, 6, 3_000_000, 18_000),
        PricedLine(Meter.CACHE_WRITE_1H, 4, 6_000_000, 24_000),
        PricedLine(Meter.OUTPUT, 5, 15_000_000, 75_000),
    )
    assert record.charged_nanos == 117_000
    assert record.writes == WRITES[:1]
    assert record.refused == (RefusedWrite(8, "capacity"),)
    assert record.engine == engine_facts(hold, **changes)


def test_a_released_request_says_why(books: Books) -> None:
    hold = books.open()

    books.database.write_now(
        lambda conn: release(
            conn,
            owner_boot_id=OWNER,
            request_id=hold.request_id,
            reason="overloaded",
            ended_at_ms=NOW_MS + 9,
        )
    )
    record = books.database.read_now(lambda conn: request_record(conn, hold.request_id))

    assert (record.status, record.release_reason, record.error_type, record.ended_at_ms) == (
        "released", "overloaded", None, NOW_MS + 9,
    )  # fmt: skip
    assert record.engine is None


def test_nothing_is_known_of_another_id(books: Books) -> None:
    assert books.database.read_now(lambda conn: request_record(conn, "req_nobody")) is None
    # PostgreSQL keeps no NUL, and would rather fail than not find it.
    assert books.database.read_now(lambda conn: request_record(conn, "req_\0")) is None


def test_another_organizations_request_looks_like_none_open_or_ended(books: Books) -> None:
    make_books(books.database, name="org_b")
    ended = books.open()
    books.settle(ended)
    is_open = books.open()

    def seen(request_id: str, organization_id: str) -> bool:
        record = books.database.read_now(
            lambda conn: request_record(conn, request_id, organization_id=organization_id)
        )
        return record is not None

    assert [seen(hold.request_id, "org_a") for hold in (ended, is_open)] == [True, True]
    assert [seen(hold.request_id, "org_b") for hold in (ended, is_open)] == [False, False]
