"""We cut, it is free; you cut, you pay from the first token on: seen by the client that cuts."""

from pathlib import Path
from typing import Any

import pytest

from tests.gateway.books import assert_books_agree
from tests.gateway.stack import Stack, running_stack, word_config
from tests.gateway.talk import Split, read_events, split_of, split_of_usage, text, user

PREFIX = [text(1000, "p", ttl="5m")]
SHORT = {"system": PREFIX, "messages": [user(text(20, "u"))]}
# Behind the prefix a second marked one, which takes many steps to compute.
LONG = {"system": [*PREFIX, text(4000, "q", ttl="5m")], "messages": [user(text(20, "u"))]}


@pytest.fixture
def stack(tmp_path: Path):
    with running_stack(tmp_path, config=word_config(max_num_batched_tokens=20)) as stack:
        yield stack
        stack.wait_until(lambda: stack.open_holds() == [])


def abort_before_the_first_token(stack: Stack, body: dict[str, Any]) -> dict[str, Any]:
    """Leave once the request is admitted; return its record."""
    stack.runner.prefill_seconds = 0.02
    with stack.stream(body) as response:
        assert next(read_events(response))["type"] == "message_start"
        request_id = response.headers["request-id"]
    stack.wait_until(lambda: stack.open_holds() == [])
    stack.runner.prefill_seconds = 0
    record = assert_books_agree(stack, request_id)
    assert (record["status"], record["engine"]["output_tokens"]) == ("aborted", 0)
    return record


def test_an_abort_before_the_first_token_costs_nothing(stack: Stack):
    record = abort_before_the_first_token(stack, LONG)

    assert (record["postings"], split_of_usage(record["usage"])) == ([], Split())


def test_it_leaves_no_entry_and_no_lease_that_it_wrote(stack: Stack):
    record = abort_before_the_first_token(stack, LONG)

    assert record["engine"]["tokens_computed"] > 0
    stack.wait_until(lambda: stack.engine.core.stats()["kv_blocks_pinned"] == 0)
    assert split_of(stack.post(SHORT)) == Split(w5=1000, input=20)


def test_it_renews_no_entry_that_it_read(stack: Stack):
    assert split_of(stack.post(SHORT)) == Split(w5=1000, input=20)
    stack.at(200)
    abort_before_the_first_token(stack, LONG)
    stack.at(299)
    assert (
        stack.database.read_now(
            lambda conn: conn.exec_driver_sql(
                "SELECT max(expires_at_ms) FROM cache_entries"
            ).scalar()
        )
        == stack.now_ms() + 1_000
    )

    stack.at(301)
    assert split_of(stack.post(SHORT)) == Split(w5=1000, input=20)


def test_a_billed_read_renews_from_its_admission_on(stack: Stack):
    assert split_of(stack.post(SHORT)) == Split(w5=1000, input=20)
    stack.at(200)
    stack.runner.prefill_seconds = 0.02
    with stack.stream(LONG) as response:
        assert next(read_events(response))["type"] == "message_start"
        stack.at(400)
        stack.runner.prefill_seconds = 0

        assert split_of(stack.post(SHORT)) == Split(read=1000, input=20)


def test_an_abort_after_the_first_token_pays_for_input_and_output(stack: Stack):
    stack.runner.pace_seconds = 0.02
    with stack.stream(SHORT | {"max_tokens": 5_000}) as response:
        events = read_events(response)
        while next(events)["type"] != "content_block_delta":
            pass
        request_id = response.headers["request-id"]
    stack.wait_until(lambda: stack.open_holds() == [])

    record = assert_books_agree(stack, request_id)
    assert record["status"] == "aborted"
    assert record["usage"]["output_tokens"] > 0
    assert split_of_usage(record["usage"]) == Split(w5=1000, input=20)
