"""Settlement: the named cases of the fault reports, and that everything happens exactly once."""

from dataclasses import replace

import pytest

from billing import accounts
from billing.database import Database
from billing.entries import activate, find_live
from billing.errors import HoldNotFound, HoldNotOwned, InconsistentFacts
from billing.facts import GrantFact
from billing.ledger import balance, top_up
from billing.meters import Meter, Quantities, WritePoint
from billing.settlement import CutBy, charge_due, release
from tests.billing.books import NOW_MS, OWNER, Books, engine_facts, make_books

WRITE = WritePoint(8, "5m", "key-8")


@pytest.fixture
def books(database: Database) -> Books:
    return make_books(database)


@pytest.fixture
def prepaid(database: Database) -> Books:
    return make_books(database, "prepaid")


def add(books: Books, amount_nanos: int, transfer_id: str = "txn_top_up") -> None:
    books.database.write_now(
        lambda conn: top_up(
            conn,
            organization_id=books.organization_id,
            amount_nanos=amount_nanos,
            transfer_id=transfer_id,
            now_ms=NOW_MS,
        )
    )


def test_b01_written_tokens_are_not_input_as_well(books: Books) -> None:
    postings = books.request(w5=12_304, u=3, o=550)

    assert postings == {"input": 9_000, "cache_write_5m": 46_140_000, "output": 8_250_000}
    assert sum(postings.values()) == 54_399_000
    books.assert_sound()


def test_b02_a_write_costs_1_25_times_input_and_not_on_top_of_it(books: Books) -> None:
    assert books.request(w5=1_000) == {"cache_write_5m": 3_750_000}


def test_b03_a_read_is_netted_out_of_input(books: Books) -> None:
    postings = books.request(read=2_579, u=50, o=17)

    assert postings == {"input": 150_000, "cache_read": 773_700, "output": 255_000}


def test_b07_the_tokens_around_a_marker_are_billed(books: Books) -> None:
    assert books.request(w5=1_000, u=19) == {"input": 57_000, "cache_write_5m": 3_750_000}


def test_b11_reads_are_billed(books: Books) -> None:
    assert books.request(read=6_081, u=14) == {"input": 42_000, "cache_read": 1_824_300}


def test_b18_one_hour_writes_cost_twice_input(books: Books) -> None:
    assert books.request(w1h=3_441) == {"cache_write_1h": 20_646_000}


def test_b20_both_ttl_classes_of_one_request_stay_apart(books: Books) -> None:
    assert books.request(w1h=1_000, w5=2_000, u=10, o=5) == {
        "input": 30_000,
        "cache_write_5m": 7_500_000,
        "cache_write_1h": 6_000_000,
        "output": 75_000,
    }


def test_b39_a_second_settle_changes_nothing(books: Books) -> None:
    hold = books.open()
    first = books.settle(hold, output_tokens=5)

    second = books.settle(hold, output_tokens=99, prompt_tokens=11)

    assert second == first
    assert (first.repeated, second.repeated) == (False, True)
    assert books.postings(hold.request_id) == {"input": 30_000, "output": 75_000}
    books.assert_sound()


def test_settling_after_a_release_answers_the_release(books: Books) -> None:
    hold = books.open()

    def let_go(request_id: str) -> object:
        return books.database.write_now(
            lambda conn: release(
                conn,
                owner_boot_id=OWNER,
                request_id=request_id,
                reason="rejected",
                ended_at_ms=NOW_MS,
            )
        )

    first = let_go(hold.request_id)

    assert books.settle(hold) == first
    assert let_go(hold.request_id) == first
    assert books.postings(hold.request_id) == {}
    books.assert_sound()


def test_releasing_after_a_settlement_answers_the_settlement(books: Books) -> None:
    hold = books.open()
    first = books.settle(hold)

    second = books.database.write_now(
        lambda conn: release(
            conn, owner_boot_id=OWNER, request_id=hold.request_id, reason="late", ended_at_ms=NOW_MS
        )
    )

    assert second == first
    assert second.record.status == "completed"


def test_a_hold_that_was_never_opened_cannot_be_settled(books: Books) -> None:
    with pytest.raises(HoldNotFound, match="req_1"):
        books.settle(books.hold())


def test_b43_a_top_up_pays_the_debt_first(prepaid: Books) -> None:
    add(prepaid, 1_000, "txn_first")
    prepaid.settle(prepaid.open(total_tokens=666_667, amount_nanos=1_000), output_tokens=0)
    assert (prepaid.prepaid_nanos(), prepaid.debt_nanos()) == (0, 2_000_000_000)

    add(prepaid, 5_000_000_000)

    assert (prepaid.prepaid_nanos(), prepaid.debt_nanos()) == (3_000_000_000, 0)
    prepaid.assert_sound()


def test_a_small_top_up_pays_back_a_part_of_the_debt(prepaid: Books) -> None:
    prepaid.settle(prepaid.open(amount_nanos=0), output_tokens=0)

    add(prepaid, 10_000)

    assert (prepaid.prepaid_nanos(), prepaid.debt_nanos()) == (0, 20_000)
    prepaid.assert_sound()


def test_b44_a_settlement_above_the_balance_posts_whole_rows_and_one_cover(
    prepaid: Books,
) -> None:
    add(prepaid, 100_000)
    hold = prepaid.open(amount_nanos=60_000)
    assert prepaid.held_nanos() == 60_000

    settlement = prepaid.settle(hold, output_tokens=10)

    assert settlement.record.charged_nanos == 180_000
    assert prepaid.postings(hold.request_id) == {"input": 30_000, "output": 150_000}
    assert prepaid.held_nanos() == 0
    assert prepaid.prepaid_nanos() == 0
    assert prepaid.debt_nanos() == 80_000
    prepaid.assert_sound()


def test_a_top_up_is_added_once_for_each_transfer_id(prepaid: Books) -> None:
    add(prepaid, 5_000)
    add(prepaid, 5_000)
    assert prepaid.prepaid_nanos() == 5_000

    add(prepaid, 5_000, "txn_other")
    assert prepaid.prepaid_nanos() == 10_000


def test_a_postpaid_request_is_owed_and_earned(books: Books) -> None:
    books.request(u=10, o=5)

    read = books.database.read_now
    owed = read(lambda conn: balance(conn, accounts.unbilled(books.organization_id)))
    earned = read(lambda conn: balance(conn, accounts.revenue(Meter.OUTPUT)))
    assert (owed.debit_nanos, owed.pending_nanos) == (105_000, 0)
    assert earned.credit_nanos == 75_000


def test_facts_that_contradict_the_hold_leave_it_open(books: Books) -> None:
    hold = books.open()

    with pytest.raises(InconsistentFacts, match="prompt is 11, not 10"):
        books.settle(hold, prompt_tokens=11, tokens_computed=11)
    with pytest.raises(InconsistentFacts, match="output"):
        books.settle(hold, output_tokens=hold.max_tokens + 1)

    books.settle(hold)
    books.assert_sound()


HOLD = Books(None, "org_a").hold(total_tokens=10, read_tokens=2, writes=(WRITE,))  # type: ignore[arg-type]
PAID = Quantities(input=2, cache_read=2, cache_write_5m=6, output=5)
UNCOMMITTED = (GrantFact(8, True, "granted", committed=False),)
REFUSED = (GrantFact(8, True, "refused", "capacity"),)
REFRESHED = (GrantFact(8, True, "refreshed", committed=True),)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, PAID),
        ({"finish_reason": "max_tokens"}, PAID),
        ({"finish_reason": "finished"}, PAID),
        ({"finish_reason": "error"}, None),
        ({"finish_reason": "error", "output_tokens": 0}, None),
        ({"finish_reason": "engine_lost"}, None),
        ({"finish_reason": "engine_lost", "output_tokens": 0}, None),
        ({"grants": REFRESHED}, PAID),
        ({"grants": UNCOMMITTED}, replace(PAID, input=8, cache_write_5m=0)),
        ({"grants": REFUSED}, replace(PAID, input=8, cache_write_5m=0)),
        ({"grants": ()}, replace(PAID, input=8, cache_write_5m=0)),
    ],
)
def test_who_is_charged_what(changes: dict[str, object], expected: Quantities | None) -> None:
    due = charge_due(HOLD, engine_facts(HOLD, **changes))

    assert (due.quantities if due else None) == expected


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("reason", "cut_by", "output_tokens", "pays"),
    [
        ("aborted", "client", 5, True),
        ("aborted", "client", 0, False),
        ("max_tokens", "client", 5, True),  # the output had ended before the client left
        ("aborted", "us", 5, False),
        ("aborted", None, 5, False),  # the engine aborted it, its client did not
        ("max_tokens", "us", 5, False),
        ("error", None, 5, False),
        ("error", "client", 5, False),
        ("engine_lost", None, 5, False),
        ("engine_lost", "client", 5, False),
        ("stop_token", None, 0, True),
    ],
)
def test_we_cut_it_is_free_you_cut_you_pay_from_the_first_token_on(
    reason: str, cut_by: CutBy | None, output_tokens: int, pays: bool, stream: bool
) -> None:
    facts = engine_facts(HOLD, finish_reason=reason, output_tokens=output_tokens)

    due = charge_due(replace(HOLD, stream=stream), facts, cut_by=cut_by)

    assert (due and due.quantities) == (replace(PAID, output=output_tokens) if pays else None)


def test_what_we_cut_leaves_no_entry_and_its_record_says_what_was_done(books: Books) -> None:
    hold = books.open(writes=(WRITE,))
    books.database.write_now(
        lambda conn: activate(conn, request_id=hold.request_id, num_tokens=WRITE.num_tokens)
    )

    record = books.settle(hold, finish_reason="aborted", cut_by="us").record

    live = books.database.read_now(lambda conn: find_live(conn, ["key-8"], now_ms=NOW_MS))
    assert (record.status, record.charged_nanos, record.writes, live) == ("failed", 0, (), {})
    assert record.engine is not None
    assert record.engine.output_tokens == 5
    books.assert_sound()


def test_an_abort_before_the_first_token_costs_nothing_and_leaves_no_entry(books: Books) -> None:
    hold = books.open(writes=(WRITE,))

    record = books.settle(hold, finish_reason="aborted", cut_by="client", output_tokens=0).record

    assert (record.status, record.charged_nanos, record.writes) == ("aborted", 0, ())
    books.assert_sound()


def test_a_hold_is_closed_by_its_owner_alone(books: Books) -> None:
    hold = books.open()

    with pytest.raises(HoldNotOwned, match="boot_1"):
        books.settle(replace(hold, owner_boot_id="boot_2"))

    assert books.settle(hold).record.status == "completed"


def test_a_failed_request_keeps_its_engine_record_and_costs_nothing(books: Books) -> None:
    hold = books.open()

    record = books.settle(hold, finish_reason="error", output_tokens=0).record

    assert (record.status, record.charged_nanos, record.quantities) == ("failed", 0, Quantities())
    assert record.engine is not None
    books.assert_sound()


def test_a_request_that_its_client_aborted_says_so_and_pays_for_its_output(books: Books) -> None:
    hold = books.open(stream=True)

    record = books.settle(hold, finish_reason="aborted", cut_by="client", output_tokens=2).record

    assert (record.status, record.quantities) == ("aborted", Quantities(input=10, output=2))
    assert record.charged_nanos == 60_000
    books.assert_sound()
