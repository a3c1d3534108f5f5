"""A ledger that lost what it had committed is noticed against the engine's journal."""

import asyncio
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from billing.database import Database
from gateway.background.ledger_check import check_ledger
from tests.gateway.stack import Stack, running_stack
from tests.gateway.talk import text, user

ASK = {"messages": [user(text(20, "u"))]}


@pytest.fixture
def stack(tmp_path: Path):
    with running_stack(tmp_path) as stack:
        yield stack


def checked(stack: Stack, database: Database) -> str | None:
    deps = replace(stack.gateway.deps, database=database)
    checking = asyncio.run_coroutine_threadsafe(check_ledger(deps), stack.gateway.loop)
    return checking.result(20)


def test_a_whole_ledger_has_every_request_that_the_engine_served(stack: Stack):
    for _ in range(3):
        stack.post(ASK)

    assert checked(stack, stack.database) is None
    assert stack.metric("kvmeter_ledger_requests_lost") == 0


def test_an_older_copy_of_the_database_lacks_the_later_requests(stack: Stack, tmp_path: Path):
    stack.post(ASK)
    older = tmp_path / "older.sqlite3"
    with (
        closing(sqlite3.connect(stack.folder / "ledger.sqlite3")) as source,
        closing(sqlite3.connect(older)) as target,
    ):
        source.backup(target)
    lost = [stack.post(ASK).headers["request-id"] for _ in range(5)]

    with closing(Database(f"sqlite:///{older}", now_ms=stack.now_ms)) as database:
        problem = checked(stack, database)

    assert problem is not None
    assert "lacks 5 of the last 6 requests" in problem
    assert f"({lost[4]}, {lost[3]}, {lost[2]}, ...)" in problem
    assert stack.metric("kvmeter_ledger_requests_lost") == 5
