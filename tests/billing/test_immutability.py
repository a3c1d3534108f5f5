"""What is booked stays: the database itself refuses, whoever asks and however."""

import pytest
from sqlalchemy import Connection, insert, text
from sqlalchemy.exc import DBAPIError, IntegrityError

from billing import accounts
from billing.database import Database
from billing.decisions import release_by_operator
from billing.lease_costs import LeaseCost, record_lease_costs
from billing.meters import Meter
from billing.owners import server_secret_of
from billing.tables import IMMUTABLE, transfers
from tests.billing.books import NOW_MS, Books, make_books

TABLES = [table.name for table in IMMUTABLE]
NO_OP = {
    "price_cards": "version = version",
    "price_rates": "rate_pico = rate_pico",
    "requests": "status = status",
    "transfers": "amount_nanos = amount_nanos",
    "kv_records": "output_tokens = output_tokens",
    "lease_reports": "tokens = tokens",
    "hold_decisions": "reason = reason",
    "server_secret": "secret_hex = secret_hex",
}


@pytest.fixture
def books(database: Database) -> Books:
    books = make_books(database)
    books.request(u=10, o=5)
    report = LeaseCost("eng:0", "req_1", 10, "expired", "device", 1, 2, 3)
    books.database.write_now(lambda conn: record_lease_costs(conn, [report], reported_at_ms=NOW_MS))
    hold = books.open()
    books.database.write_now(
        lambda conn: release_by_operator(
            conn, request_id=hold.request_id, actor="ada", reason="lost", now_ms=NOW_MS
        )
    )
    books.database.write_now(lambda conn: server_secret_of(conn, proposed=b"secret"))
    return books


def execute(books: Books, statement: str) -> None:
    books.database.write_now(lambda conn: conn.execute(text(statement)))


@pytest.mark.parametrize("table", TABLES)
def test_rows_are_neither_updated_nor_deleted_nor_truncated(books: Books, table: str) -> None:
    statements = [f"UPDATE {table} SET {NO_OP[table]}", f"DELETE FROM {table}"]
    if books.database.read_now(dialect) == "postgresql":
        statements += [
            f"TRUNCATE {table} CASCADE",
            f"UPDATE {table} SET {NO_OP[table]} WHERE false",
        ]

    for statement in statements:
        with pytest.raises(DBAPIError, match="is append-only"):
            execute(books, statement)

    books.assert_sound()


@pytest.mark.parametrize("table", TABLES)
def test_sqlite_rows_are_not_replaced(books: Books, table: str) -> None:
    if books.database.read_now(dialect) == "postgresql":
        update = f"INSERT INTO {table} SELECT * FROM {table} ON CONFLICT DO NOTHING"
        execute(books, update)  # PostgreSQL has no REPLACE; the nearest thing changes nothing
    else:
        with pytest.raises(DBAPIError, match="is append-only"):
            execute(books, f"INSERT OR REPLACE INTO {table} SELECT * FROM {table}")

    books.assert_sound()


def dialect(conn: Connection) -> str:
    return conn.dialect.name


USAGE = {
    "tx_id": "txn_forged",
    "seq": 1,
    "kind": "usage",
    "debit_account_id": accounts.unbilled("org_a"),
    "credit_account_id": accounts.revenue(Meter.CACHE_READ),
    "amount_nanos": 300,
    "meter": "cache_read",
    "quantity": 1,
    "rate_pico": 300_000,
    "price_card_id": "word-model@1",
    "request_id": "req_1",
    "effective_at_ms": NOW_MS,
    "booked_at_ms": NOW_MS,
}
TOP_UP = {**USAGE, "kind": "top_up", "meter": None, "quantity": None, "rate_pico": None,
          "price_card_id": None, "request_id": None}  # fmt: skip


@pytest.mark.parametrize(
    ("row", "constraint"),
    [
        ({**USAGE, "amount_nanos": 301}, "amount"),
        ({**USAGE, "amount_nanos": -300}, "amount"),
        ({**USAGE, "quantity": 0, "amount_nanos": 0}, "quantity"),
        ({**USAGE, "quantity": 2**31}, "quantity"),
        ({**USAGE, "rate_pico": 2**31}, "rate"),
        ({**USAGE, "rate_pico": None}, "metered"),
        ({**USAGE, "request_id": None}, "metered"),
        ({**USAGE, "meter": "speech"}, "meter"),
        ({**USAGE, "kind": "gift"}, "kind"),
        ({**USAGE, "credit_account_id": USAGE["debit_account_id"]}, "two_ends"),
        ({**USAGE, "request_id": "req_nobody"}, "(?i)foreign key"),
        ({**USAGE, "meter": "input"}, "(?i)unique.*request_id|is append-only"),
        ({**USAGE, "tx_id": "txn_1"}, "(?i)pk_transfers|is append-only"),
        ({**TOP_UP, "amount_nanos": 0}, "amount"),
        ({**TOP_UP, "quantity": 1}, "metered"),
    ],
)
def test_the_database_refuses_a_wrong_transfer(
    books: Books, row: dict[str, object], constraint: str
) -> None:
    with pytest.raises(IntegrityError, match=constraint):
        books.database.write_now(lambda conn: conn.execute(insert(transfers), row))

    books.assert_sound()


def test_the_database_takes_a_metered_row_worth_nothing_but_no_other(books: Books) -> None:
    worthless = {**USAGE, "rate_pico": 499, "amount_nanos": 0}

    books.database.write_now(lambda conn: conn.execute(insert(transfers), worthless))
