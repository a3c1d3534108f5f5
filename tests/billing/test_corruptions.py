"""Every kind of corruption that was tried by hand is named with its row, and never a traceback.

Two customers, one prepaid, with writes, reads, a debt, a repayment, a release and a request in
progress. Each kind is what someone could do who can switch the database's protection off.
"""

from pathlib import Path

import pytest
from sqlalchemy import Connection, text

from billing.booking import close_period
from billing.database import Database
from billing.decisions import release_by_operator
from billing.lease_costs import LeaseCost, record_lease_costs
from billing.ledger import top_up
from billing.settlement import release
from billing.verification import verify
from tests.billing.books import NOW_MS, OWNER, Books, make_books
from tests.billing.tampering import sqlite_path, tamper

MONTH_MS = 2_678_400_000
TO_OTHER_ORG = """UPDATE accounts SET debits_posted_nanos = debits_posted_nanos {}
    (SELECT amount_nanos FROM transfers WHERE kind = 'overdraft') WHERE id = 'overdraft:{}'"""


@pytest.fixture
def books(database: Database) -> Books:
    postpaid, prepaid = make_books(database), make_books(database, "prepaid", "org_b")
    prepaid._numbers = postpaid._numbers
    add(prepaid, 5_000_000, "txn_paid_1")
    postpaid.request(w5=1000, u=20, o=50)
    postpaid.request(read=1000, u=20, o=10)
    prepaid.request(w1h=600, u=10, o=20)
    over = prepaid.open(total_tokens=2020, max_tokens=100, amount_nanos=1_000_000)
    prepaid.settle(over, output_tokens=100)
    add(prepaid, 9_000_000, "txn_paid_2")
    refused, decided = postpaid.open(), postpaid.open()
    report = LeaseCost("eng:0", "req_1", 1000, "expired", "device", 1, 2, 3)

    def close(conn: Connection) -> None:
        release(
            conn, request_id=refused.request_id, owner_boot_id=OWNER, reason="overloaded",
            ended_at_ms=NOW_MS + 5,
        )  # fmt: skip
        release_by_operator(
            conn, request_id=decided.request_id, actor="ada", reason="lost", now_ms=NOW_MS
        )
        record_lease_costs(conn, [report], reported_at_ms=NOW_MS)

    database.write_now(close)
    postpaid.open()
    postpaid.assert_sound()
    return postpaid


def add(books: Books, amount_nanos: int, transfer_id: str) -> None:
    books.database.write_now(
        lambda conn: top_up(
            conn, organization_id=books.organization_id, amount_nanos=amount_nanos,
            transfer_id=transfer_id, now_ms=NOW_MS,
        )
    )  # fmt: skip


def problems(books: Books) -> tuple[str, ...]:
    return books.database.read_now(verify).problems


@pytest.mark.parametrize(
    ("statements", "sentence"),
    [
        pytest.param(
            ["UPDATE transfers SET amount_nanos = amount_nanos + 1"
             " WHERE request_id = 'req_1' AND meter = 'input'"],
            "Transfer txn_1/1 is not quantity x rate: 60001.",
            id="an amount raised",
        ),
        pytest.param(
            ["DELETE FROM transfers WHERE request_id = 'req_1' AND meter = 'output'"],
            "Request req_1 has other quantities than its transfers.",
            id="a posting deleted",
        ),
        pytest.param(
            ["UPDATE accounts SET credits_posted_nanos = credits_posted_nanos + 1"
             " WHERE id = 'revenue:input'"],
            "Account revenue:input says",
            id="a total raised",
        ),
        pytest.param(
            ["DELETE FROM kv_records WHERE request_id = 'req_1'"],
            "Request req_1 is completed without an engine record.",
            id="an engine record deleted",
        ),
        pytest.param(
            ["UPDATE holds SET state = 'open', closed_at_ms = NULL WHERE request_id = 'req_1'",
             "UPDATE accounts SET debits_pending_nanos = debits_pending_nanos +"
             " (SELECT amount_nanos FROM holds WHERE request_id = 'req_1')"
             " WHERE id = 'unbilled:org_a'"],
            "Hold req_1 is open and has a final request.",
            id="a hold opened again",
        ),
        pytest.param(
            ["UPDATE price_rates SET rate_pico = 1 WHERE meter = 'output'"],
            "Price card word-model@1 has other content than was published.",
            id="a rate changed",
        ),
        pytest.param(
            ["UPDATE requests SET organization_id = 'org_b' WHERE id = 'req_1'"],
            "Request req_1 has another organization_id than its hold: org_b.",
            id="a request moved to another organisation",
        ),
        pytest.param(
            ["UPDATE requests SET key_id = 'key_nobody', workspace_id = 'wrk_nobody'"
             " WHERE id = 'req_1'"],
            "Row req_1 of requests refers to a row that api_keys has not: key_nobody.",
            id="a request moved to a key that does not exist",
        ),
        pytest.param(
            [f"UPDATE requests SET ended_at_ms = ended_at_ms - {MONTH_MS} WHERE id = 'req_1'"],
            "Request req_1 ended before it started",
            id="a request moved to another month",
        ),
        pytest.param(
            [f"UPDATE requests SET ended_at_ms = ended_at_ms + {MONTH_MS} WHERE id = 'req_5'"],
            "Request req_5 ended after its hold was closed",
            id="a free request moved to another month",
        ),
        pytest.param(
            [f"UPDATE transfers SET effective_at_ms = effective_at_ms - {MONTH_MS},"
             f" booked_at_ms = booked_at_ms - {MONTH_MS} WHERE request_id = 'req_1'"],
            "Transfer txn_1/1 is booked at another time than its hold",
            id="a posting moved to another month",
        ),
        pytest.param(
            ["UPDATE transfers SET debit_account_id = 'overdraft:org_a' WHERE kind = 'overdraft'",
             TO_OTHER_ORG.format("-", "org_b"), TO_OTHER_ORG.format("+", "org_a")],
            "Transfer txn_4/3 is no overdraft of one customer: overdraft:org_a to prepaid:org_b.",
            id="a debt moved to another customer",
        ),
        pytest.param(
            ["UPDATE transfers SET credit_account_id = 'overdraft:org_a' WHERE kind = 'repayment'"],
            "Transfer txn_paid_2/2 is no repayment of one customer",
            id="a repayment moved to another customer",
        ),
        pytest.param(
            ["DELETE FROM outbox WHERE id = 'usage:req_1'"],
            "Outbox row usage:req_1 is missing.",
            id="an outbox row deleted",
        ),
        pytest.param(
            ["UPDATE outbox SET payload = replace(payload, '750000', '0')"],
            "Outbox row usage:req_1 says other than its request and transfers.",
            id="outbox amounts zeroed",
        ),
        pytest.param(
            ["UPDATE outbox SET payload = 'garbage' WHERE id = 'usage:req_1'"],
            "Outbox row usage:req_1 cannot be read",
            id="an outbox row that is not JSON",
        ),
        pytest.param(
            ["INSERT INTO outbox VALUES ('usage:req_x', 'usage', '{}', 1, NULL)"],
            "Outbox row usage:req_x is of no charged request.",
            id="an outbox row forged",
        ),
        pytest.param(
            ["INSERT INTO cache_entries VALUES"
             " ('forged', 'req_1', 50000, '1h', 3600000, 'live', 1811536000000, NULL)"],
            "Cache entry forged of req_1 is none that its request asked for.",
            id="a live entry forged",
        ),
        pytest.param(
            [f"UPDATE cache_entries SET expires_at_ms = expires_at_ms + {MONTH_MS}"],
            "Cache entry key-5m of req_1 expires at a time that no request gave it",
            id="an entry prolonged",
        ),
        pytest.param(
            ["UPDATE organizations SET mode = 'postpaid' WHERE id = 'org_b'"],
            "Organization org_b is postpaid, and 2 of its holds are of another account",
            id="a mode flipped",
        ),
        pytest.param(
            ["UPDATE requests SET requested_model = 'x', model_id = 'y', stream = 1"
             " WHERE id = 'req_1'"],
            "Request req_1 has another model_id than its hold: y.",
            id="a request's model rewritten",
        ),
        pytest.param(
            ["UPDATE requests SET status = 'failed', stop_reason = NULL WHERE id = 'req_1'"],
            "Request req_1 is failed, the engine says stop_token.",
            id="a request's status rewritten",
        ),
        pytest.param(
            ["UPDATE price_rates SET rate_pico = 1000000 WHERE meter = 'output'",
             "UPDATE transfers SET rate_pico = 1000000, amount_nanos = quantity * 1000"
             " WHERE meter = 'output'"],
            "Price card word-model@1 has other content than was published.",
            id="a price and its postings cut alike",
        ),
        pytest.param(
            ["UPDATE holds SET writes = 'garbage' WHERE state = 'open'"],
            "Hold req_7 cannot be read: A stored row cannot be read, column writes",
            id="a hold's writes that are not JSON",
        ),
        pytest.param(
            ["""UPDATE holds SET writes = '[{"tokens":"many","ttl_class":"5m","entry_key":"k"}]'
                WHERE state = 'open'"""],
            "Hold req_7 cannot be read",
            id="a hold's writes of another type",
        ),
        pytest.param(
            ["UPDATE kv_records SET grants = '{' WHERE request_id = 'req_1'"],
            "Request req_1 cannot be read: A stored row cannot be read, column grants",
            id="grants that are not JSON",
        ),
        pytest.param(
            ["UPDATE transfers SET meter = 'speech' WHERE tx_id = 'txn_1' AND seq = 1"],
            "Transfer txn_1/1 cannot be read: 'speech' is not a valid Meter.",
            id="a meter that is none",
        ),
        pytest.param(
            ["DELETE FROM accounts WHERE id = 'overdraft:org_b'"],
            "Account overdraft:org_b is missing.",
            id="an account deleted",
        ),
        pytest.param(
            ["DELETE FROM accounts WHERE id = 'revenue:cache_write_1h'"],
            "Row txn_3/2 of transfers refers to a row that accounts has not",
            id="an account of ours deleted",
        ),
        pytest.param(
            ["INSERT INTO lease_reports VALUES"
             " ('lease_x', 10, 0, 'expired', 'req_2', 'nokey', 999, 'device', 1, 1)"],
            "Lease lease_x is of another entry than its request wrote.",
            id="a lease report forged",
        ),
        pytest.param(
            ["DELETE FROM hold_decisions"],
            "Request req_6 was released by hand without a decision.",
            id="a decision deleted",
        ),
        pytest.param(
            ["UPDATE hold_decisions SET request_id = 'req_5'"],
            "Decision on req_5 is released, and its hold was not.",
            id="a decision moved",
        ),
        pytest.param(
            ["UPDATE booking_clock SET last_booked_at_ms = 5"],
            "The booking clock says 5, the newest booking",
            id="the booking clock set back",
        ),
        pytest.param(
            ["DELETE FROM booking_clock"],
            "The booking clock has no row.",
            id="the booking clock deleted",
        ),
        pytest.param(
            ["UPDATE transfers SET amount_nanos = -5 WHERE tx_id = 'txn_paid_1'"],
            "Row txn_paid_1/1 of transfers breaks the rule ck_transfers_amount.",
            id="a rule broken",
        ),
    ],
)  # fmt: skip
def test_a_corruption_is_named_with_its_row(
    books: Books, statements: list[str], sentence: str
) -> None:
    tamper(books, *statements)

    found = problems(books)

    assert any(problem.startswith(sentence) for problem in found), found


def test_a_flipped_byte_of_the_file_is_named(books: Books) -> None:
    if books.database.read_now(lambda conn: conn.dialect.name) != "sqlite":
        return  # PostgreSQL's own page checksums
    path = Path(sqlite_path(books))
    tamper(books, "PRAGMA wal_checkpoint(TRUNCATE)")
    books.database.close()
    content = bytearray(path.read_bytes())
    content[content.find(b"req_2", 4096) + 4] = ord("7")
    path.write_bytes(content)
    database = Database(f"sqlite:///{path}", now_ms=lambda: 0)

    found = database.read_now(verify).problems

    assert any("req_7" in problem or "file is damaged" in problem for problem in found), found
    database.close()


def test_a_table_that_cannot_be_read_stops_no_other_check(books: Books) -> None:
    tamper(books, "ALTER TABLE outbox RENAME TO gone", "UPDATE requests SET charged_nanos = 1")

    report = books.database.read_now(verify)

    assert any("The check of outbox could not be finished" in p for p in report.problems)
    assert any("was charged 1, posted" in problem for problem in report.problems)
    assert "outbox" not in report.row_counts
    assert [hold.request_id for hold in report.open_holds] == ["req_7"]


def test_a_closed_period_leaves_the_books_sound(books: Books) -> None:
    books.database.write_now(lambda conn: close_period(conn, until_ms=NOW_MS + MONTH_MS))

    books.assert_sound()


# README, "Not guaranteed": every copy of a number is changed alike, or every row of it is gone.
CHANGED_ALIKE = {
    "a top-up raised": [
        "UPDATE transfers SET amount_nanos = amount_nanos + 5 WHERE tx_id = 'txn_paid_1'",
        "UPDATE accounts SET debits_posted_nanos = debits_posted_nanos + 5"
        " WHERE id = 'operator_funding'",
        "UPDATE accounts SET credits_posted_nanos = credits_posted_nanos + 5"
        " WHERE id = 'prepaid:org_b'",
    ],
    "a free request removed": [
        "DELETE FROM requests WHERE id = 'req_5'",
        "DELETE FROM holds WHERE request_id = 'req_5'",
    ],
}


@pytest.mark.parametrize("kind", CHANGED_ALIKE)
def test_what_was_changed_alike_everywhere_needs_a_hash_chain(books: Books, kind: str) -> None:
    tamper(books, *CHANGED_ALIKE[kind])

    assert books.database.read_now(lambda conn: conn.scalar(text("SELECT 1"))) == 1
    assert problems(books) == ()
