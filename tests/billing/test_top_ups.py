"""Top-ups: each transfer id moves money once, and a repeated id with other values is refused."""

import pytest
from sqlalchemy import func, select

from billing import accounts
from billing.database import Database
from billing.errors import NotPrepaid, TransferConflict, UnknownOrganization
from billing.ledger import Balance, TopUp, balance, top_up
from billing.tables import transfers
from tests.billing.books import NOW_MS, Books, make_books


@pytest.fixture
def books(database: Database) -> Books:
    return make_books(database, "prepaid")


def add(books: Books, amount_nanos: int, transfer_id: str, organization_id: str = "org_a") -> TopUp:
    return books.database.write_now(
        lambda conn: top_up(
            conn,
            organization_id=organization_id,
            amount_nanos=amount_nanos,
            transfer_id=transfer_id,
            now_ms=NOW_MS,
        )
    )


def num_transfers(books: Books) -> int:
    query = select(func.count()).select_from(transfers)
    return books.database.read_now(lambda conn: conn.scalar(query)) or 0


def test_a_repeated_top_up_returns_the_balance_and_moves_nothing(books: Books) -> None:
    first = add(books, 5_000, "txn_1")

    second = add(books, 5_000, "txn_1")

    assert (first.repeated, second.repeated) == (False, True)
    assert first.balance == second.balance
    assert second.balance.credit_nanos == 5_000
    assert num_transfers(books) == 1
    books.assert_sound()


def test_a_transfer_id_with_another_amount_or_organization_is_refused(books: Books) -> None:
    make_books(books.database, "prepaid", name="org_b")
    add(books, 5_000, "txn_1")

    with pytest.raises(TransferConflict, match="txn_1") as conflict:
        add(books, 5_001, "txn_1")
    with pytest.raises(TransferConflict):
        add(books, 5_000, "txn_1", organization_id="org_b")

    assert conflict.value.transfer_id == "txn_1"
    assert books.prepaid_nanos() == 5_000
    assert num_transfers(books) == 1
    books.assert_sound()


def test_the_transfer_id_of_a_settlement_is_no_top_up(books: Books) -> None:
    add(books, 1_000_000, "txn_first")
    hold = books.open()
    books.settle(hold)
    settled_id = "txn_" + hold.request_id.removeprefix("req_")

    with pytest.raises(TransferConflict):
        add(books, 30_000, settled_id)

    books.assert_sound()


def test_an_unknown_organization_is_not_topped_up(books: Books) -> None:
    with pytest.raises(UnknownOrganization, match="org_nobody"):
        add(books, 5_000, "txn_1", organization_id="org_nobody")

    assert num_transfers(books) == 0


def test_a_postpaid_organization_has_no_balance_to_top_up(books: Books) -> None:
    make_books(books.database, "postpaid", name="org_b")

    with pytest.raises(NotPrepaid, match="org_b"):
        add(books, 5_000, "txn_1", organization_id="org_b")

    assert num_transfers(books) == 0


def test_what_open_holds_reserve_is_not_available(books: Books) -> None:
    add(books, 100_000, "txn_top_up")
    hold = books.open(amount_nanos=60_000)

    def prepaid() -> Balance:
        account_id = accounts.prepaid(books.organization_id)
        return books.database.read_now(lambda conn: balance(conn, account_id))

    assert (prepaid().credit_nanos, prepaid().available_nanos) == (100_000, 40_000)
    books.settle(hold, output_tokens=0)
    assert (prepaid().credit_nanos, prepaid().available_nanos) == (70_000, 70_000)
