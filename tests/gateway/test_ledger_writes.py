"""A ledger that does not take a write in time: the request is refused, and nothing comes of it."""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection

from billing.database import Database
from billing.ledger import top_up
from tests.gateway.books import assert_books_agree
from tests.gateway.stack import Stack, running_stack
from tests.gateway.talk import Split, split_of, text, user

ASK = {
    "system": [text(1000, "s", ttl="5m")],
    "messages": [user(text(20, "u"))],
    "max_tokens": 40,
}


class ImpatientDatabase(Database):
    """A database whose callers give up at once while `is_locked`."""

    is_locked = False

    async def write(self, operation: Callable[[Connection], Any], **bounds: Any) -> Any:
        if self.is_locked:
            bounds = {"begin_within": timedelta(milliseconds=50)}
        return await super().write(operation, **bounds)


@pytest.fixture
def stack(tmp_path: Path):
    with running_stack(tmp_path, database_class=ImpatientDatabase) as stack:
        yield stack
        stack.wait_until(lambda: stack.open_holds() == [])


@contextmanager
def locked(stack: Stack) -> Iterator[None]:
    """Another process holds the database's write lock."""
    other = sqlite3.connect(stack.folder / "ledger.sqlite3", isolation_level=None, timeout=10)
    other.execute("BEGIN IMMEDIATE")
    stack.database.is_locked = True  # type: ignore[attr-defined]
    yield
    stack.database.is_locked = False  # type: ignore[attr-defined]
    other.execute("ROLLBACK")
    other.close()


def test_a_request_refused_under_a_lock_leaves_no_hold_and_delays_no_retry(stack: Stack):
    key = stack.new_organization("org_prepaid", mode="prepaid")
    stack.database.write_now(
        lambda conn: top_up(
            conn,
            organization_id="org_prepaid",
            amount_nanos=1_000_000_000,
            transfer_id="txn_1",
            now_ms=stack.now_ms(),
        )
    )

    with locked(stack):
        refused = stack.post(ASK, key=key)
    retried = stack.post(ASK, key=key)

    assert refused.status_code == 529
    assert split_of(retried) == Split(w5=1000, input=20), "The refused one wrote no entry."
    assert stack.open_holds() == []


def test_a_settlement_given_up_under_a_lock_charges_nothing_later(stack: Stack):
    stack.runner.gate.clear()
    with stack.in_background(ASK) as answer:
        stack.wait_until(stack.runner.at_gate.is_set)
        with locked(stack):
            stack.runner.gate.set()
            stack.wait_until(answer.done)

    assert answer.result().status_code == 529
    stack.wait_until(lambda: stack.open_holds() == [])
    record = assert_books_agree(stack, answer.result().headers["request-id"])
    assert (record["status"], record["charged_nanos"]) == ("failed", "0")
