"""Usage reports: sums of the transfers, every request in exactly one day."""

import json
import re

import pytest

from billing.database import Database
from billing.holds import Hold
from billing.meters import Meter
from billing.reports import MS_PER_DAY, usage
from billing.settlement import release, settle
from tests.billing.books import OWNER, Books, engine_facts, make_books

DAY_MS = 20_600 * MS_PER_DAY  # 2026-05-27


@pytest.fixture
def books(database: Database) -> Books:
    return make_books(database)


def end(books: Books, hold: Hold, ended_at_ms: int, output_tokens: int = 5) -> None:
    books.database.write_now(
        lambda conn: settle(
            conn,
            owner_boot_id=OWNER,
            request_id=hold.request_id,
            facts=engine_facts(hold, output_tokens=output_tokens),
            ended_at_ms=ended_at_ms,
            stop_reason="end_turn",
        )
    )


def test_the_report_is_the_sum_of_the_postings(books: Books) -> None:
    books.request(w1h=1_000, w5=2_000, u=10, o=5)
    books.request(read=3_000, u=20)

    (row,) = books.database.read_now(usage)

    assert row.group == {"organization": "org_a"}
    assert row.num_requests == 2
    assert list(row.quantities.values()) == [30, 3_000, 2_000, 1_000, 5]
    assert list(row.amounts_nanos.values()) == [90_000, 900_000, 7_500_000, 6_000_000, 75_000]
    assert row.total_nanos == 14_565_000


def test_money_in_a_report_is_text(books: Books) -> None:
    books.request(u=10, o=5)

    (row,) = books.database.read_now(usage)
    shown = json.loads(json.dumps(row.as_json()))

    assert shown["organization"] == "org_a"
    assert shown["meters"]["output"] == {
        "quantity": 5, "amount_nanos": "75000", "amount_usd": "0.000075000",
    }  # fmt: skip
    assert set(shown["meters"]) == {meter.value for meter in Meter}
    assert re.fullmatch(r"\d+\.\d{9}", shown["total_usd"])


def test_every_request_is_in_exactly_one_day(books: Books) -> None:
    for ended_at_ms in (DAY_MS - 1, DAY_MS, DAY_MS + MS_PER_DAY - 1, DAY_MS + MS_PER_DAY):
        end(books, books.open(started_at_ms=0), ended_at_ms)

    days = books.database.read_now(lambda conn: usage(conn, group_by=["day"]))

    assert [(row.group["day"], row.num_requests) for row in days] == [
        ("2026-05-26", 1),
        ("2026-05-27", 2),
        ("2026-05-28", 1),
    ]
    (one_day,) = books.database.read_now(
        lambda conn: usage(conn, since_ms=DAY_MS, until_ms=DAY_MS + MS_PER_DAY)
    )
    assert one_day.num_requests == 2
    (whole,) = books.database.read_now(usage)
    assert whole.total_nanos == sum(row.total_nanos for row in days)


def test_groups_are_split_and_sorted(database: Database, books: Books) -> None:
    other = make_books(database, name="org_b")
    other._numbers = books._numbers
    other.request(u=1, o=1)
    books.request(u=1, o=1)

    rows = database.read_now(
        lambda conn: usage(conn, group_by=["organization", "workspace", "key", "model"])
    )

    assert [row.group for row in rows] == [
        {"organization": name, "workspace": f"wrk_{name.removeprefix('org_')}",
         "key": f"key_{name}", "model": "word-model"}
        for name in ("org_a", "org_b")
    ]  # fmt: skip
    (only,) = database.read_now(lambda conn: usage(conn, organization_id="org_b"))
    assert only.group == {"organization": "org_b"}


def test_a_request_that_cost_nothing_is_counted(books: Books) -> None:
    hold = books.open()
    books.database.write_now(
        lambda conn: release(
            conn,
            owner_boot_id=OWNER,
            request_id=hold.request_id,
            reason="overloaded",
            ended_at_ms=DAY_MS,
        )
    )

    (row,) = books.database.read_now(usage)

    assert (row.num_requests, row.total_nanos) == (1, 0)


def test_no_grouping_gives_one_total_and_no_requests_give_no_rows(books: Books) -> None:
    assert books.database.read_now(usage) == []
    books.request(u=1)

    (row,) = books.database.read_now(lambda conn: usage(conn, group_by=[]))
    assert row.group == {}
    assert row.num_requests == 1
