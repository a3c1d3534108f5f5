"""Decisions: an operator closes a hold by hand, once, and it is recorded who and why."""

import pytest
from sqlalchemy import Connection, text

from billing.database import Database
from billing.decisions import Decision, decision_on, release_by_operator, settle_by_operator
from billing.errors import HoldInUse, HoldNotFound, HoldNotOpen, InconsistentFacts, RowUnreadable
from billing.facts import EngineFacts
from billing.holds import Hold, count_open_holds, open_hold_rows
from billing.owners import Owner, register
from billing.settlement import Settlement
from tests.billing.books import NOW_MS, OWNER, Books, engine_facts, make_books


@pytest.fixture
def books(database: Database) -> Books:
    return make_books(database)


def release_by_hand(books: Books, request_id: str, *, force: bool = False) -> Settlement:
    return books.database.write_now(
        lambda conn: release_by_operator(
            conn, request_id=request_id, actor="ada", reason="engine was replaced",
            now_ms=NOW_MS + 9, force=force,
        )
    )  # fmt: skip


def settle_by_hand(books: Books, request_id: str, facts: EngineFacts) -> Settlement:
    return books.database.write_now(
        lambda conn: settle_by_operator(
            conn, request_id=request_id, facts=facts, actor="ada", reason="checked by hand",
            now_ms=NOW_MS + 9,
        )
    )  # fmt: skip


def decision(books: Books, hold: Hold) -> Decision | None:
    return books.database.read_now(lambda conn: decision_on(conn, hold.request_id))


def test_a_hold_released_by_hand_is_free_and_says_who_and_why(books: Books) -> None:
    hold = books.open()

    record = release_by_hand(books, hold.request_id).record

    assert (record.status, record.release_reason, record.charged_nanos) == (
        "released", "operator", 0,
    )  # fmt: skip
    assert decision(books, hold) == Decision(
        request_id=hold.request_id,
        decision="released",
        actor="ada",
        reason="engine was replaced",
        decided_at_ms=NOW_MS + 9,
    )
    books.assert_sound()


def test_a_hold_settled_by_hand_is_charged_as_any_other(books: Books) -> None:
    by_hand, usual = books.open(), books.open()

    record = settle_by_hand(books, by_hand.request_id, engine_facts(by_hand)).record

    assert record.charged_nanos == books.settle(usual).record.charged_nanos > 0
    made = decision(books, by_hand)
    assert made is not None
    assert (made.decision, made.actor, made.reason) == ("settled", "ada", "checked by hand")
    assert decision(books, usual) is None
    books.assert_sound()


def test_a_hold_of_a_gateway_that_runs_is_left_to_it_unless_forced(books: Books) -> None:
    hold = books.open()
    owner = Owner(boot_id=OWNER, instance_id="i", engine_id="e", started_at_ms=NOW_MS, beats=0)
    books.database.write_now(lambda conn: register(conn, owner))

    with pytest.raises(HoldInUse, match="boot_1 runs"):
        release_by_hand(books, hold.request_id)
    release_by_hand(books, hold.request_id, force=True)

    assert books.settle(hold).record.status == "released", "The gateway's own close comes late."
    books.assert_sound()


def test_what_is_closed_or_unknown_is_not_closed_by_hand(books: Books) -> None:
    hold = books.open()
    books.settle(hold)

    with pytest.raises(HoldNotOpen, match="is not open, it is settled"):
        release_by_hand(books, hold.request_id)
    with pytest.raises(HoldNotOpen):
        settle_by_hand(books, hold.request_id, engine_facts(hold))
    with pytest.raises(HoldNotFound):
        release_by_hand(books, "req_nobody")
    assert decision(books, hold) is None


def test_a_hold_whose_writes_cannot_be_read_is_listed_and_can_be_released(books: Books) -> None:
    hold = books.open()

    def damage(conn: Connection) -> None:
        conn.execute(text("UPDATE holds SET writes = 'garbage'"))

    books.database.write_now(damage)

    (row,) = books.database.read_now(open_hold_rows)
    assert (row["request_id"], row["writes"]) == (hold.request_id, "garbage")
    with pytest.raises(RowUnreadable, match="column writes"):
        settle_by_hand(books, hold.request_id, engine_facts(hold))
    release_by_hand(books, hold.request_id)
    assert books.database.read_now(count_open_holds).num_holds == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"overrun_tokens": -1},
        {"queued_ms": -5},
        {"num_preemptions": 2**60},
        {"reads_by_tier": {"host": -1}},
    ],
)
def test_a_counter_that_no_engine_counts_is_refused_in_one_sentence(
    books: Books, wrong: dict[str, int]
) -> None:
    hold = books.open()

    with pytest.raises(InconsistentFacts, match=r"is -?\d+"):
        books.settle(hold, **wrong)

    assert books.database.read_now(count_open_holds).num_holds == 1


def test_the_open_holds_are_counted_with_the_start_of_the_oldest(books: Books) -> None:
    books.open(started_at_ms=NOW_MS + 5)
    books.settle(books.open(started_at_ms=NOW_MS - 50))
    books.open(started_at_ms=NOW_MS + 2)

    counted = books.database.read_now(count_open_holds)

    assert (counted.num_holds, counted.oldest_started_at_ms) == (2, NOW_MS + 2)
