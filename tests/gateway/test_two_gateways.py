"""Two gateways on one database and one engine: each closes its own holds, and a dead one's."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from billing.owners import end_owner, running_owners
from tests.gateway.books import assert_books_agree
from tests.gateway.stack import Serving, Stack, running_stack
from tests.gateway.talk import Split, split_of, split_of_usage, text, user
from tests.gateway.test_recovery import Reader

ASK = {
    "system": [text(2000, "s", ttl="5m")],
    "messages": [user(text(30, "u"))],
    "max_tokens": 200,
}


@pytest.fixture
def stack(tmp_path: Path):
    settings = {"gateway_dead_after_seconds": 1.2}
    with running_stack(tmp_path, settings=settings) as stack:
        stack.runner.pace_seconds = 0.01
        yield stack
        stack.wait_until(lambda: stack.open_holds() == [])


@contextmanager
def joined_by_a_second(stack: Stack) -> Iterator[Serving]:
    """Start a second gateway, which the stack talks to from now on; yield the first."""
    first = stack.gateway
    stack.start_gateway(boot_id="gw_two", instance="elsewhere")
    try:
        yield first
    finally:
        first.stop()


def test_a_second_gateway_leaves_the_firsts_requests_alone(stack: Stack):
    reader = Reader(stack, ASK)

    with joined_by_a_second(stack):
        stack.runner.hurry()
        assert reader.end()["type"] == "message_stop"

    record = assert_books_agree(stack, reader.request_id)
    assert (record["status"], record["usage"]["output_tokens"]) == ("completed", 200)


def test_what_one_wrote_the_other_reads(stack: Stack):
    stack.runner.hurry()
    assert split_of(stack.post(ASK)) == Split(w5=2000, input=30)

    with joined_by_a_second(stack):
        assert split_of(stack.post(ASK)) == Split(read=2000, input=30)


def test_a_killed_gateways_holds_are_released_by_the_other(stack: Stack):
    reader = Reader(stack, ASK | {"max_tokens": 5_000})

    with joined_by_a_second(stack) as first:
        first.kill()
        stack.wait_until(lambda: stack.open_holds() == [])

    record = assert_books_agree(stack, reader.request_id)
    assert (record["status"], record["postings"]) == ("failed", [])
    assert record["engine"]["output_tokens"] >= reader.num_deltas


def test_a_gateway_that_was_taken_for_dead_charges_nothing_and_takes_no_request(stack: Stack):
    reader = Reader(stack, ASK | {"max_tokens": 5_000})
    first_url = stack.url

    with joined_by_a_second(stack) as first:
        second_url = stack.url
        paused = stack.database.read_now(running_owners)[0]
        stack.database.write_now(
            lambda conn: (
                end_owner(conn, paused, ended_by="gw_two", ended_at_ms=stack.now_ms())
                or pytest.fail("its heart beat in between")
            )
        )
        assert reader.end()["error"]["type"] == "overloaded_error"
        assert first.fenced
        stack.url = first_url
        assert stack.post(ASK).status_code == 529
        stack.url = second_url
        stack.wait_until(lambda: stack.open_holds() == [])

    record = assert_books_agree(stack, reader.request_id)
    assert (record["status"], record["postings"]) == ("failed", [])
    assert split_of_usage(record["usage"]) == Split()


def test_a_gateway_that_stops_in_order_leaves_the_other_serving(stack: Stack):
    stack.runner.hurry()
    with joined_by_a_second(stack) as first:
        first.stop()

        owners = stack.database.read_now(running_owners)
        assert [owner.boot_id for owner in owners] == ["gw_two"]
        assert split_of(stack.post(ASK)) == Split(w5=2000, input=30)
