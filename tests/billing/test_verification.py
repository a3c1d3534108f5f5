"""The books are checked by recomputing them; each kind of damage is named."""

import sqlite3
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from sqlalchemy import Connection, Engine, event

from billing.database import Database, is_sqlite, reading_engine
from billing.database import database_url as parse
from billing.holds import open_hold
from billing.lease_costs import LeaseCost, record_lease_costs
from billing.meters import WritePoint
from billing.price_cards import publish
from billing.scan import ROWS_AT_ONCE
from billing.settlement import release, settle
from billing.verification import verify
from tests.billing.books import NOW_MS, OWNER, T3, TTL_MS, Books, engine_facts, make_books
from tests.billing.tampering import tamper


@pytest.fixture
def books(database: Database) -> Books:
    books = make_books(database)
    books.request(read=4, w5=4, u=2, o=5)
    return books


def test_sound_books_have_no_problem(books: Books) -> None:
    books.open()

    report = books.database.read_now(verify)

    assert report.sound
    assert report.problems == ()
    assert report.row_counts["transfers"] == 4
    assert [hold.owner_boot_id for hold in report.open_holds] == ["boot_1"]


@pytest.mark.parametrize(
    ("table", "change", "sentences"),
    [
        (
            "accounts",
            "debits_posted_nanos = debits_posted_nanos + 1 WHERE id = 'unbilled:org_a'",
            ["Account unbilled:org_a says debits 97201", "The trial balance is not zero: -1."],
        ),
        (
            "accounts",
            "debits_pending_nanos = 7 WHERE id = 'unbilled:org_a'",
            ["Account unbilled:org_a has 7 pending, its open holds reserve 0."],
        ),
        (
            "transfers",
            "credit_account_id = 'revenue:output' WHERE meter = 'input'",
            [
                "Account revenue:input says", "Account revenue:output says",
                "Transfer txn_1/1 is earned on another meter's account: revenue:output.",
            ],
        ),
        (
            "transfers",
            "debit_account_id = 'operator_funding' WHERE meter = 'input'",
            [
                "Account operator_funding says", "Account unbilled:org_a says",
                "Transfer txn_1/1 is paid from another account than its hold: operator_funding.",
            ],
        ),
        (
            "accounts",
            "debits_posted_nanos = 1 WHERE id = 'prepaid:org_a'",
            [
                "Account prepaid:org_a says debits 1 and credits 0",
                "Account prepaid:org_a is below zero: -1.",
                "Account prepaid:org_a is in use, and its organization is postpaid.",
                "The trial balance is not zero: -1.",
            ],
        ),
        (
            "transfers",
            "amount_nanos = amount_nanos + 1 WHERE meter = 'input'",
            [
                "Row txn_1/1 of transfers breaks the rule ck_transfers_amount.",
                "Account revenue:input says", "Account unbilled:org_a says",
                "Transfer txn_1/1 is not quantity x rate: 6001.",
                "Request req_1 was charged 97200, posted 97201.",
                "Outbox row usage:req_1 says other than its request and transfers.",
            ],
        ),
        (
            "requests",
            "prompt_tokens = 11",
            [
                "Row req_1 of requests breaks the rule ck_requests_prompt.",
                "Request req_1 bills 10 of 11 tokens.",
                "Request req_1 has another prompt than its hold: 11 tokens.",
                "Request req_1 has engine facts for 10 of 11 tokens.",
                "Request req_1 bills other cache tokens than its read and its writes come to.",
            ],
        ),
        (
            "requests",
            "input_tokens = 0, cache_read_tokens = 0, cache_write_5m_tokens = 0,"
            " output_tokens = 0, charged_nanos = 0",
            [
                "Request req_1 has other quantities than its transfers.",
                "Request req_1 was charged 0, posted 97200.",
                "Request req_1 is completed and was charged nothing.",
                "Request req_1 was charged nothing and its hold is settled.",
            ],
        ),
        (
            "transfers",
            "rate_pico = 3000001 WHERE meter = 'input'",
            ["Transfer txn_1/1 has a rate that its price card does not: 3000001."],
        ),
        (
            "requests",
            "input_tokens = 1, cache_write_5m_tokens = 5",
            [
                "Request req_1 has other quantities than its transfers.",
                "Request req_1 bills other cache tokens than its read and its writes come to.",
            ],
        ),
        ("requests", "charged_nanos = 5", ["Request req_1 was charged 5, posted 97200."]),
        (
            "kv_records",
            "tokens_reused_promised = 3, tokens_computed = 7",
            ["Request req_1 bills 4 read, the engine says 3."],
        ),
        (
            "kv_records",
            "output_tokens = 4",
            ["Request req_1 bills 5 output tokens, the engine says 4."],
        ),
        (
            "kv_records",
            "grants = replace(grants, 'true,\"lease', 'false,\"lease')",
            ["Request req_1 bills a write of 8 tokens that the engine did not pin."],
        ),
        (
            "requests",
            "writes = '[]'",
            [
                "Request req_1 bills other cache tokens than its read and its writes come to.",
                "Cache entry key-5m of req_1 was not paid for.",
            ],
        ),
        (
            "holds",
            "state = 'open', closed_at_ms = NULL",
            [
                "Account unbilled:org_a has 0 pending, its open holds reserve",
                "Hold req_1 is open and has a final request.",
            ],
        ),
    ],
)  # fmt: skip
def test_damage_is_named(books: Books, table: str, change: str, sentences: list[str]) -> None:
    tamper(books, f"UPDATE {table} SET {change}")

    problems = problems_of(books)

    assert len(problems) == len(sentences), problems
    for problem, sentence in zip(problems, sentences, strict=True):
        assert problem.startswith(sentence)


def problems_of(books: Books) -> tuple[str, ...]:
    """What verify finds, without the CHECKs that had to be dropped for it."""
    found = books.database.read_now(verify).problems
    return tuple(problem for problem in found if not problem.startswith("The schema's ck_"))


def test_a_transfer_priced_by_another_card_is_named(books: Books) -> None:
    other = replace(T3, id="word-model@2", version=2)
    books.database.write_now(lambda conn: publish(conn, [other], now_ms=0))
    tamper(books, "UPDATE transfers SET price_card_id = 'word-model@2' WHERE meter = 'input'")

    assert problems_of(books) == (
        "Transfer txn_1/1 has another price card than its request: word-model@2.",
    )


def test_a_charge_without_an_engine_record_is_named(books: Books) -> None:
    tamper(books, "DELETE FROM kv_records")

    assert problems_of(books) == ("Request req_1 is completed without an engine record.",)


def test_a_released_request_is_sound(books: Books) -> None:
    hold = books.open()
    books.database.write_now(
        lambda conn: release(
            conn,
            owner_boot_id=OWNER,
            request_id=hold.request_id,
            reason="overloaded",
            ended_at_ms=NOW_MS,
        )
    )

    books.assert_sound()


def test_verifying_holds_a_few_rows_in_memory_however_large_the_tables_are(
    books: Books, database_url: str
) -> None:
    fill(books, num_requests=ROWS_AT_ONCE + 50)
    fetches: list[int] = []
    engine = counting_engine(database_url, fetches)

    with engine.begin() as conn:
        report = verify(conn)
    engine.dispose()

    assert report.sound
    assert report.row_counts["requests"] == ROWS_AT_ONCE + 51
    assert report.row_counts["lease_reports"] == ROWS_AT_ONCE + 50
    assert max(fetches) == ROWS_AT_ONCE
    # Transfers twice over the limit, requests, requests with engine records, and lease reports.
    assert fetches.count(ROWS_AT_ONCE) >= 5


def fill(books: Books, *, num_requests: int) -> None:
    """Settled requests in one commit, each with three transfers and a lease."""
    written = [
        books.hold(total_tokens=10, writes=(WritePoint(8, "5m", f"key-{number}"),))
        for number in range(num_requests)
    ]

    def write(conn: Connection) -> None:
        for hold in written:
            open_hold(conn, hold, ttl_ms=TTL_MS)
            facts = engine_facts(hold)
            settle(
                conn,
                owner_boot_id=OWNER,
                request_id=hold.request_id,
                facts=facts,
                ended_at_ms=NOW_MS,
                stop_reason="end_turn",
            )
        reports = [
            LeaseCost(f"eng:{hold.request_id}", hold.request_id, 8, "expired", "device", 1, 2, 3)
            for hold in written
        ]
        record_lease_costs(conn, reports, reported_at_ms=NOW_MS)

    books.database.write_now(write)


def counting_engine(url: str, fetches: list[int]) -> Engine:
    """A reading engine whose driver notes how many rows each fetch brought into memory."""
    engine = reading_engine(parse(url))

    class Counting:
        def fetchone(self) -> Any:
            fetches.append(1)
            return super().fetchone()  # type: ignore[misc]

        def fetchmany(self, size: int = 1) -> Any:
            rows = super().fetchmany(size)  # type: ignore[misc]
            fetches.append(len(rows))
            return rows

        def fetchall(self) -> Any:
            rows = super().fetchall()  # type: ignore[misc]
            fetches.append(len(rows))
            return rows

    class SqliteCursor(Counting, sqlite3.Cursor):
        pass

    class SqliteConnection(sqlite3.Connection):
        def cursor(self, _factory: Any = None) -> Any:
            return super().cursor(SqliteCursor)

    class ServerCursor(Counting, psycopg.ServerCursor[Any]):
        pass

    class ClientCursor(psycopg.Cursor[Any]):
        """Has its whole result in memory from the start."""

        def execute(self, *args: Any, **kwargs: Any) -> Any:
            done = super().execute(*args, **kwargs)
            fetches.append(max(0, self.rowcount))
            return done

    if is_sqlite(engine.url):

        @event.listens_for(engine, "do_connect")
        def before_connect(_dialect: Any, _record: Any, _args: Any, options: Any) -> None:
            options["factory"] = SqliteConnection

    else:

        @event.listens_for(engine, "connect")
        def on_connect(connection: Any, _record: Any) -> None:
            connection.cursor_factory = ClientCursor
            connection.server_cursor_factory = ServerCursor

    return engine
