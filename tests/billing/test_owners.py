"""Gateways own their holds: who may close what, and when."""

from dataclasses import replace

import pytest

from billing.database import Database
from billing.errors import OtherEngine, OwnerEnded
from billing.owners import (
    Owner,
    beat,
    end_owner,
    end_self,
    holds_to_close,
    register,
    require_running,
    running_owners,
    take_over,
)
from tests.billing.books import NOW_MS, Books, make_books

ONE = Owner(
    boot_id="boot_1", instance_id="one", engine_id="engine_1", started_at_ms=NOW_MS, beats=0
)
TWO = replace(ONE, boot_id="boot_2", instance_id="two", started_at_ms=NOW_MS + 1)


@pytest.fixture
def books(database: Database) -> Books:
    books = make_books(database)
    database.write_now(lambda conn: register(conn, ONE))
    database.write_now(lambda conn: register(conn, TWO))
    return books


def closable(books: Books, boot_id: str) -> list[str]:
    holds = books.database.read_now(lambda conn: holds_to_close(conn, boot_id))
    return [hold.request_id for hold in holds]


def test_a_living_gateways_holds_are_its_own_to_close(books: Books) -> None:
    hold = books.open()

    assert closable(books, "boot_1") == [hold.request_id]
    assert closable(books, "boot_2") == []


def test_a_dead_gateways_holds_are_any_others_to_close_and_only_once(books: Books) -> None:
    hold = books.open()
    write = books.database.write_now

    assert write(lambda conn: end_owner(conn, ONE, ended_by="boot_2", ended_at_ms=NOW_MS))

    assert closable(books, "boot_2") == [hold.request_id]
    assert write(lambda conn: take_over(conn, hold, boot_id="boot_2"))
    assert not write(lambda conn: take_over(conn, hold, boot_id="boot_3"))
    assert closable(books, "boot_1") == []


def test_a_hold_of_an_unknown_gateway_is_a_dead_ones(books: Books) -> None:
    hold = books.open(owner_boot_id="boot_of_an_older_version")

    assert closable(books, "boot_2") == [hold.request_id]


def test_a_heart_that_has_beaten_since_is_not_ended(books: Books) -> None:
    books.database.write_now(lambda conn: beat(conn, "boot_1"))

    ended = books.database.write_now(
        lambda conn: end_owner(conn, ONE, ended_by="boot_2", ended_at_ms=NOW_MS)
    )

    assert not ended
    owners = books.database.read_now(running_owners)
    assert owners == [replace(ONE, beats=1), TWO]


def test_a_gateway_that_was_ended_neither_beats_nor_opens_holds(books: Books) -> None:
    write = books.database.write_now
    write(lambda conn: end_owner(conn, ONE, ended_by="boot_2", ended_at_ms=NOW_MS))

    with pytest.raises(OwnerEnded, match="boot_1"):
        write(lambda conn: beat(conn, "boot_1"))
    with pytest.raises(OwnerEnded, match="boot_1"):
        books.database.read_now(lambda conn: require_running(conn, "boot_1"))
    books.database.read_now(lambda conn: require_running(conn, "boot_2"))


def test_a_new_start_of_an_instance_ends_its_earlier_process(books: Books) -> None:
    again = replace(ONE, boot_id="boot_3", started_at_ms=NOW_MS + 2)

    books.database.write_now(lambda conn: register(conn, again))

    assert books.database.read_now(running_owners) == [TWO, again]


def test_an_ordered_stop_ends_the_ownership_once(books: Books) -> None:
    for ended_at_ms in (NOW_MS + 5, NOW_MS + 9):
        books.database.write_now(
            lambda conn, at=ended_at_ms: end_self(conn, "boot_1", ended_at_ms=at)
        )

    assert books.database.read_now(running_owners) == [TWO]


def test_a_gateway_with_another_engine_is_refused_while_one_runs(books: Books) -> None:
    foreign = replace(ONE, boot_id="boot_3", instance_id="three", engine_id="engine_2")
    write = books.database.write_now

    with pytest.raises(OtherEngine, match="several engines are not supported yet"):
        write(lambda conn: register(conn, foreign))

    for owner in (ONE, TWO):
        write(lambda conn, owner=owner: end_self(conn, owner.boot_id, ended_at_ms=NOW_MS))
    write(lambda conn: register(conn, foreign))
    assert books.database.read_now(running_owners) == [foreign]
