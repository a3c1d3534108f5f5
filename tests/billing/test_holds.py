"""Holds: reserved by one guarded UPDATE, and never half of one."""

import asyncio
from dataclasses import replace

import pytest
from sqlalchemy import func, select

from billing.database import Database
from billing.entries import find_live
from billing.errors import InsufficientBalance, UnknownOrganization
from billing.holds import Hold, OpenHold, find_hold, open_hold, open_holds
from billing.ledger import top_up
from billing.meters import WritePoint
from billing.tables import cache_entries, holds
from tests.billing.books import NOW_MS, OWNER, TTL_MS, Books, make_books, no_clock

WORST_NANOS = 1_000_000


@pytest.fixture
def prepaid(database: Database) -> Books:
    books = make_books(database, "prepaid")
    database.write_now(
        lambda conn: top_up(
            conn,
            organization_id=books.organization_id,
            amount_nanos=10 * WORST_NANOS,
            transfer_id="txn_1",
            now_ms=NOW_MS,
        )
    )
    return books


def test_b36_fifty_at_once_get_exactly_what_the_balance_allows(
    prepaid: Books, database_url: str
) -> None:
    other_process = Database(database_url, now_ms=no_clock)
    requests = [prepaid.hold(amount_nanos=WORST_NANOS) for _ in range(50)]

    async def ask(number: int, hold: Hold) -> bool:
        database = (prepaid.database, other_process)[number % 2]
        try:
            await database.write(lambda conn: open_hold(conn, hold, ttl_ms=TTL_MS))
        except InsufficientBalance:
            return False
        return True

    async def ask_all() -> list[bool]:
        return await asyncio.gather(*(ask(*numbered) for numbered in enumerate(requests)))

    outcomes = asyncio.run(ask_all())
    other_process.close()

    assert outcomes.count(True) == 10
    assert outcomes.count(False) == 40
    assert prepaid.held_nanos() == 10 * WORST_NANOS
    assert len(prepaid.database.read_now(open_holds)) == 10
    prepaid.assert_sound()


def test_a_refused_hold_leaves_nothing(prepaid: Books) -> None:
    with pytest.raises(InsufficientBalance) as refusal:
        prepaid.open(amount_nanos=10 * WORST_NANOS + 1, writes=(WritePoint(8, "5m", "key-8"),))

    assert refusal.value.needed_nanos == 10 * WORST_NANOS + 1
    for table in (holds, cache_entries):
        count = select(func.count()).select_from(table)
        assert prepaid.database.read_now(lambda conn, query=count: conn.scalar(query)) == 0
    assert prepaid.held_nanos() == 0


def test_a_hold_of_the_whole_balance_is_allowed(prepaid: Books) -> None:
    prepaid.open(amount_nanos=10 * WORST_NANOS)

    with pytest.raises(InsufficientBalance):
        prepaid.open(amount_nanos=1)


def test_a_postpaid_hold_is_a_row_that_limits_nothing(database: Database) -> None:
    books = make_books(database)

    hold = books.open(amount_nanos=10**15)

    assert database.read_now(open_holds) == [OpenHold(hold.request_id, OWNER)]
    books.assert_sound()


def test_a_hold_keeps_all_that_settlement_needs(prepaid: Books) -> None:
    hold = prepaid.open(
        writes=(WritePoint(4, "1h", "a"), WritePoint(8, "5m", "b")),
        read_tokens=2,
        stream=True,
        requested_model="alias",
    )

    assert prepaid.database.read_now(lambda conn: find_hold(conn, hold.request_id)) == hold


def test_open_holds_are_found_oldest_first_whoever_opened_them(prepaid: Books) -> None:
    second = prepaid.open(owner_boot_id="boot_1", started_at_ms=NOW_MS + 1)
    first = prepaid.open(owner_boot_id="boot_0")
    prepaid.settle(prepaid.open(owner_boot_id="boot_0"))

    assert prepaid.database.read_now(open_holds) == [
        OpenHold(hold.request_id, hold.owner_boot_id) for hold in (first, second)
    ]


def test_an_unknown_organization_cannot_hold(prepaid: Books) -> None:
    stranger = replace(prepaid.hold(), organization_id="org_nobody")

    with pytest.raises(UnknownOrganization):
        prepaid.database.write_now(lambda conn: open_hold(conn, stranger, ttl_ms=TTL_MS))


def test_pending_entries_of_a_hold_are_not_read(prepaid: Books) -> None:
    prepaid.open(writes=(WritePoint(8, "5m", "key-8"),))

    found = prepaid.database.read_now(lambda conn: find_live(conn, ["key-8"], now_ms=NOW_MS))
    assert found == {}
