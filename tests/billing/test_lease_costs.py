"""What leases cost: each report once, totals that add up, and damage that is named."""

from dataclasses import replace

import pytest
from sqlalchemy import text

from billing.database import Database
from billing.lease_costs import (
    LeaseCost,
    PinCost,
    leases_of,
    pin_costs,
    record_lease_costs,
)
from billing.meters import WritePoint
from billing.records import request_record
from billing.verification import verify
from tests.billing.books import NOW_MS, T3, Books, make_books

WRITES = (WritePoint(4, "1h", "key-4"), WritePoint(8, "5m", "key-8"))
FIRST = LeaseCost("eng:0", "req_1", 4, "refreshed", "device", 4_096, 10, 0)


@pytest.fixture
def books(database: Database) -> Books:
    books = make_books(database)
    books.open(writes=WRITES)
    return books


def book(books: Books, *reports: LeaseCost) -> int:
    return books.database.write_now(
        lambda conn: record_lease_costs(conn, reports, reported_at_ms=NOW_MS)
    )


def rows(books: Books) -> list[tuple[object, ...]]:
    query = text("SELECT lease_id, entry_key, reason FROM lease_reports ORDER BY 1, idle_block_ms")
    return books.database.read_now(lambda conn: [tuple(row) for row in conn.execute(query)])


def test_a_report_names_the_entry_that_its_request_wrote(books: Books) -> None:
    assert book(books, FIRST, replace(FIRST, lease_id="eng:1", num_tokens=8)) == 2

    assert rows(books) == [("eng:0", "key-4", "refreshed"), ("eng:1", "key-8", "refreshed")]
    books.assert_sound()


def test_a_lease_of_an_entry_that_was_only_read_has_no_key(books: Books) -> None:
    book(books, replace(FIRST, num_tokens=3))

    assert rows(books) == [("eng:0", None, "refreshed")]
    books.assert_sound()


def test_a_report_that_is_told_again_changes_nothing(books: Books) -> None:
    assert book(books, FIRST, FIRST) == 1
    assert book(books, FIRST) == 0

    assert len(rows(books)) == 1


def test_the_same_totals_for_another_reason_are_another_report(books: Books) -> None:
    book(books, FIRST)

    assert book(books, replace(FIRST, reason="expired")) == 1


def test_a_report_of_an_unknown_request_is_not_kept(books: Books) -> None:
    assert book(books, FIRST, replace(FIRST, request_id="req_unknown")) == 1


def test_a_lease_costs_its_largest_report_in_whatever_order_they_come(books: Books) -> None:
    last = replace(FIRST, reason="expired", idle_block_ms=70, contended_block_ms=20)
    book(books, last)
    book(books, FIRST, replace(FIRST, idle_block_ms=70, contended_block_ms=5))

    assert books.database.read_now(lambda conn: leases_of(conn, "req_1")) == (last,)
    (cost,) = books.database.read_now(pin_costs)
    assert (cost.num_leases, cost.idle_block_ms, cost.contended_block_ms) == (1, 70, 20)
    books.assert_sound()


def test_costs_add_up_by_workspace_and_model(books: Books) -> None:
    other = make_books(books.database, name="org_b")
    other_id = other.open(request_id="req_other", writes=WRITES).request_id
    book(
        books,
        FIRST,
        replace(FIRST, lease_id="eng:1", num_tokens=8, idle_block_ms=1, contended_block_ms=2),
        replace(FIRST, lease_id="eng:2", request_id=other_id),
    )

    costs = books.database.read_now(pin_costs)

    assert [(c.organization_id, c.num_leases) for c in costs] == [("org_a", 2), ("org_b", 1)]
    workspace_id = books.hold().workspace_id
    assert costs[0] == PinCost("org_a", workspace_id, T3.model_id, 2, 11, 2)


def test_a_request_s_record_has_what_it_made_the_engine_pin(books: Books) -> None:
    hold = books.open(writes=WRITES)
    books.settle(hold)
    mine = replace(FIRST, request_id=hold.request_id)
    book(books, mine)

    record = books.database.read_now(lambda conn: request_record(conn, hold.request_id))

    assert record is not None
    assert record.leases == (mine,)


def test_more_reports_than_one_statement_takes_are_booked(books: Books) -> None:
    many = [replace(FIRST, lease_id=f"eng:{number}") for number in range(1_200)]

    assert book(books, *many) == 1_200
    assert book(books, *many) == 0


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        ("entry_key = 'key-9'", "is of another entry than its request wrote"),
        ("tokens = 8, entry_key = 'key-8'", "is reported for two breakpoints"),
        ("contended_block_ms = 0", "has a contended total that fell"),
    ],
)
def test_verify_names_reports_that_cannot_be_true(books: Books, damage: str, problem: str) -> None:
    book(books, replace(FIRST, contended_block_ms=5))
    book(books, replace(FIRST, idle_block_ms=70, contended_block_ms=9))
    books.assert_sound()

    def write(conn):
        if conn.dialect.name == "postgresql":
            conn.execute(text("SET LOCAL session_replication_role = 'replica'"))
        else:
            conn.execute(text("DROP TRIGGER lease_reports_no_update"))
        conn.execute(text(f"UPDATE lease_reports SET {damage} WHERE idle_block_ms = 70"))

    books.database.write_now(write)

    assert any(problem in p for p in books.database.read_now(verify).problems)


def test_a_hold_whose_writes_cannot_be_read_stops_no_report(books: Books) -> None:
    damaged, sound = books.open(), books.open(writes=(WritePoint(8, "5m", "key-8"),))
    damage = f"UPDATE holds SET writes = 'garbage' WHERE request_id = '{damaged.request_id}'"
    books.database.write_now(lambda conn: conn.exec_driver_sql(damage))
    reports = [
        LeaseCost(f"eng:{hold.request_id}", hold.request_id, 8, "expired", "device", 1, 2, 3)
        for hold in (damaged, sound)
    ]

    recorded = books.database.write_now(
        lambda conn: record_lease_costs(conn, reports, reported_at_ms=NOW_MS)
    )

    assert recorded == 2
