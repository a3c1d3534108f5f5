"""Random histories against a plain model: the books balance whatever happens, and once."""

import asyncio
from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from billing.customers import create_organization
from billing.database import Database
from billing.errors import InsufficientBalance
from billing.holds import Hold, open_hold, open_holds
from billing.ledger import top_up, trial_balance
from billing.settlement import release, settle
from tests.billing.books import NOW_MS, OWNER, TTL_MS, Books, engine_facts, make_books, no_clock

operations = st.lists(
    st.one_of(
        st.tuples(st.just("top_up"), st.integers(1, 3_000_000)),
        st.tuples(st.just("hold"), st.integers(0, 1_000_000)),
        st.tuples(st.just("settle"), st.integers(0, 60)),
        st.tuples(st.just("release"), st.just(0)),
        st.tuples(st.just("again"), st.integers(0, 60)),
    ),
    max_size=25,
)


@dataclass
class Model:
    """What a prepaid customer's money must come to."""

    paid_nanos: int = 0
    charged_nanos: int = 0
    held: dict[str, Hold] = field(default_factory=dict)
    closed: list[tuple[Hold, dict[str, int]]] = field(default_factory=list)

    @property
    def available_nanos(self) -> int:
        held = sum(hold.amount_nanos for hold in self.held.values())
        return max(0, self.paid_nanos - self.charged_nanos) - held


class History:
    """Runs operations against the ledger and the model at once."""

    def __init__(self, books: Books) -> None:
        self.books, self.model = books, Model()
        self._top_ups = count(1)

    def top_up(self, amount_nanos: int) -> None:
        organization_id = self.books.organization_id
        transfer_id = f"txn_{organization_id}_{next(self._top_ups)}"
        self.books.database.write_now(
            lambda conn: top_up(
                conn, organization_id=organization_id, amount_nanos=amount_nanos,
                transfer_id=transfer_id, now_ms=NOW_MS,
            )
        )  # fmt: skip
        self.model.paid_nanos += amount_nanos

    def hold(self, amount_nanos: int) -> None:
        try:
            hold = self.books.open(amount_nanos=amount_nanos)
        except InsufficientBalance:
            assert self.model.available_nanos < amount_nanos
            return
        assert self.model.available_nanos >= amount_nanos
        self.model.held[hold.request_id] = hold

    def settle(self, output_tokens: int) -> None:
        if self.model.held:
            _, hold = self.model.held.popitem()
            self.books.settle(hold, output_tokens=output_tokens)
            self.model.charged_nanos += 30_000 + 15_000 * output_tokens
            self.model.closed.append((hold, self.books.postings(hold.request_id)))

    def release(self, _unused: int) -> None:
        if self.model.held:
            _, hold = self.model.held.popitem()
            self._release(hold)
            self.model.closed.append((hold, {}))

    def again(self, output_tokens: int) -> None:
        if self.model.closed:
            hold, postings = self.model.closed[output_tokens % len(self.model.closed)]
            self.books.settle(hold, output_tokens=output_tokens)
            self._release(hold)
            assert self.books.postings(hold.request_id) == postings

    def assert_books_match(self) -> None:
        books, model = self.books, self.model
        difference = model.paid_nanos - model.charged_nanos
        assert books.prepaid_nanos() - books.debt_nanos() == difference
        assert books.held_nanos() == sum(hold.amount_nanos for hold in model.held.values())
        assert min(books.prepaid_nanos(), books.debt_nanos()) == 0

    def _release(self, hold: Hold) -> None:
        self.books.database.write_now(
            lambda conn: release(
                conn,
                owner_boot_id=OWNER,
                request_id=hold.request_id,
                reason="test",
                ended_at_ms=NOW_MS,
            )
        )


@pytest.fixture
def shared(database: Database) -> Books:
    return make_books(database)


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(script=operations)
def test_any_history_keeps_the_books(shared: Books, script: list[tuple[str, int]]) -> None:
    books = make_books(shared.database, "prepaid", f"org_{next(shared._numbers)}")
    books._numbers = shared._numbers
    history = History(books)

    for name, argument in script:
        getattr(history, name)(argument)
        history.assert_books_match()

    books.assert_sound()
    balances = shared.database.read_now(trial_balance)
    assert sum(balance.credit_nanos for balance in balances) == 0


def test_b50_two_processes_on_the_same_accounts_lose_nothing(
    database: Database, database_url: str
) -> None:
    books = [make_books(database, name=f"org_{number}") for number in range(4)]
    for other in books[1:]:
        other._numbers = books[0]._numbers
    second = Database(database_url, now_ms=no_clock)

    async def one_request(number: int) -> None:
        process = (database, second)[number % 2]
        hold = books[number % 4 if number % 2 else 3 - number % 4].hold()
        await process.write(lambda conn: open_hold(conn, hold, ttl_ms=TTL_MS))
        await process.write(
            lambda conn: settle(
                conn,
                owner_boot_id=OWNER,
                request_id=hold.request_id, facts=engine_facts(hold), ended_at_ms=NOW_MS,
                stop_reason="end_turn",
            )
        )  # fmt: skip

    async def all_requests() -> None:
        await asyncio.gather(*(one_request(number) for number in range(100)))

    asyncio.run(all_requests())
    second.close()

    assert database.read_now(open_holds) == []
    books[0].assert_sound()
    earned = {balance.account_id: balance for balance in database.read_now(trial_balance)}
    assert earned["revenue:input"].credit_nanos == 100 * 30_000


def test_two_organizations_made_at_once_both_exist(database: Database, database_url: str) -> None:
    second = Database(database_url, now_ms=no_clock)

    async def make(number: int) -> None:
        process = (database, second)[number % 2]
        await process.write(
            lambda conn: create_organization(
                conn, id=f"org_{number}", name="", mode="prepaid", now_ms=NOW_MS
            )
        )

    async def make_all() -> None:
        await asyncio.gather(*(make(number) for number in range(10)))

    asyncio.run(make_all())
    second.close()

    assert len(database.read_now(trial_balance)) == 10 * 3 + 6
