"""Whatever dies in the middle of a request, its hold is closed once; what we cut is free."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection

from billing.database import Database
from billing.errors import WriterUnavailable
from tests.gateway.books import assert_books_agree
from tests.gateway.stack import Stack, running_stack
from tests.gateway.talk import Split, read_events, split_of, split_of_usage, text, user

SYSTEM = [text(2000, "s", ttl="5m")]
ASK = {"system": SYSTEM, "messages": [user(text(30, "u"))], "max_tokens": 5000}


@pytest.fixture
def stack(tmp_path: Path):
    with running_stack(tmp_path, settings={"engine_wait_seconds": 0.2}) as stack:
        stack.runner.pace_seconds = 0.01
        yield stack
        stack.wait_until(lambda: stack.open_holds() == [])


class Reader:
    """A client that reads a stream in a thread; `events` grows as they come."""

    def __init__(self, stack: Stack, body: dict[str, Any]) -> None:
        self.events: list[dict[str, Any]] = []
        self.request_id = ""
        self.broken: Exception | None = None
        self._thread = threading.Thread(target=self._read, args=(stack, body))
        self._thread.start()
        stack.wait_until(lambda: self.num_deltas >= 3)

    @property
    def num_deltas(self) -> int:
        return sum(event["type"] == "content_block_delta" for event in self.events)

    def end(self) -> dict[str, Any]:
        """The last event."""
        self._thread.join(20)
        assert not self._thread.is_alive()
        return self.events[-1]

    def _read(self, stack: Stack, body: dict[str, Any]) -> None:
        try:
            with stack.stream(body) as response:
                self.request_id = response.headers["request-id"]
                for event in read_events(response):
                    self.events.append(event)
        except Exception as error:  # noqa: BLE001 - the server was killed
            self.broken = error


def wait_recovered(stack: Stack, request_id: str) -> dict[str, Any]:
    stack.wait_until(lambda: stack.open_holds() == [])
    return assert_books_agree(stack, request_id)


def assert_free(record: dict[str, Any]) -> None:
    assert (record["status"], record["error_type"]) == ("failed", "overloaded_error")
    assert (record["postings"], record["charged_nanos"]) == ([], "0")
    assert split_of_usage(record["usage"]) == Split()


def test_a_stream_that_loses_its_engine_is_free_and_its_record_says_what_it_cost_us(stack: Stack):
    reader = Reader(stack, ASK)

    stack.kill_engine()

    assert reader.end()["error"]["type"] == "overloaded_error"
    assert stack.open_holds() == [reader.request_id]
    stack.start_engine()
    record = wait_recovered(stack, reader.request_id)
    assert_free(record)
    assert (record["engine"]["finish_reason"], record["release_reason"]) == ("engine_lost", None)
    assert record["engine"]["output_tokens"] >= reader.num_deltas
    assert split_of(stack.post(ASK | {"max_tokens": 1})) == Split(w5=2000, input=30)


def test_a_read_is_billed_the_same_after_its_kv_was_lost(stack: Stack):
    assert split_of(stack.post(ASK | {"max_tokens": 1})) == Split(w5=2000, input=30)
    reader = Reader(stack, ASK)
    stack.kill_engine()
    reader.end()
    stack.start_engine()
    wait_recovered(stack, reader.request_id)

    response = stack.post(ASK | {"max_tokens": 1})

    assert split_of(response) == Split(read=2000, input=30)
    engine = assert_books_agree(stack, response.headers["request-id"])["engine"]
    assert (engine["tokens_read_recomputed"], engine["tokens_reused_promised"]) == (2000, 0)


def test_a_whole_message_that_loses_its_engine_is_overloaded(stack: Stack):
    with stack.in_background(ASK) as answer:
        stack.wait_until(lambda: stack.runner.num_steps > 4)
        stack.kill_engine()

    assert answer.result().status_code == 529
    stack.start_engine()
    record = wait_recovered(stack, answer.result().headers["request-id"])
    assert (record["status"], record["postings"]) == ("failed", [])


def test_without_an_engine_a_request_waits_a_little_and_holds_nothing(stack: Stack):
    stack.stop_engine()

    response = stack.post(ASK)

    assert response.status_code == 529
    assert response.json()["error"]["type"] == "overloaded_error"
    assert stack.open_holds() == []
    stack.start_engine()


def test_an_engine_with_other_weights_is_not_sold_as_this_model(stack: Stack):
    assert split_of(stack.post(ASK | {"max_tokens": 1})) == Split(w5=2000, input=30)
    stack.stop_engine()
    stack.start_engine(weights_digest="1" * 64)
    stack.wait_until(lambda: "other weights" in stack.http().get("/readyz").text)

    response = stack.post(ASK)

    assert response.status_code == 529
    assert response.json()["error"]["type"] == "overloaded_error"
    assert "another model" in response.json()["error"]["message"]
    assert stack.http().get(f"/v1/kvmeter/requests/{response.headers['request-id']}").is_error
    stack.stop_engine()
    stack.start_engine()
    stack.wait_until(lambda: "engine:" not in stack.http().get("/readyz").text)
    assert split_of(stack.post(ASK | {"max_tokens": 1})) == Split(read=2000, input=30)


def test_an_engine_that_stops_in_order_ends_its_requests(stack: Stack):
    reader = Reader(stack, ASK)

    stack.stop_engine()

    assert reader.end()["error"]["type"] == "overloaded_error"
    stack.start_engine()
    record = wait_recovered(stack, reader.request_id)
    assert_free(record)
    assert record["engine"]["output_tokens"] >= reader.num_deltas


def test_a_killed_gateways_request_is_released_by_the_next(stack: Stack):
    reader = Reader(stack, ASK)

    stack.kill_gateway()

    reader.end()
    assert stack.open_holds() == [reader.request_id]
    stack.start_gateway(boot_id="gw_two")
    record = wait_recovered(stack, reader.request_id)
    assert_free(record)
    assert record["engine"]["finish_reason"] == "aborted"
    assert record["engine"]["output_tokens"] >= reader.num_deltas
    assert split_of(stack.post(ASK | {"max_tokens": 1})) == Split(w5=2000, input=30)


def test_a_killed_gateways_request_that_the_engine_never_saw_costs_nothing(stack: Stack):
    reader = Reader(stack, ASK)
    stack.kill_engine()
    stack.kill_gateway()
    reader.end()
    for segment in (stack.folder / "journal").iterdir():
        segment.unlink()

    stack.start_engine()
    stack.start_gateway(boot_id="gw_two")

    record = wait_recovered(stack, reader.request_id)
    assert (record["status"], record["postings"]) == ("released", [])
    assert (record["release_reason"], record["error_type"]) == ("never_admitted", None)
    stack.runner.pace_seconds = 0
    assert split_of(stack.post(ASK | {"max_tokens": 1})) == Split(w5=2000, input=30)


def test_a_drain_lets_short_requests_end_and_cuts_long_ones_for_free(stack: Stack):
    short = Reader(stack, ASK | {"max_tokens": 20})
    long = Reader(stack, ASK)

    stack.drain(1.0)

    assert stack.open_holds() == []
    assert short.end()["type"] == "message_stop"
    assert long.end()["error"]["type"] == "overloaded_error"
    assert stack.post(ASK).status_code == 529
    record = assert_books_agree(stack, long.request_id)
    assert_free(record)
    assert record["engine"]["output_tokens"] >= long.num_deltas


class RefusingDatabase(Database):
    """A database that refuses the next so many settlements."""

    refusals = 0

    async def write(self, operation: Callable[[Connection], Any], **bounds: Any) -> Any:
        if self.refusals and getattr(operation, "func", None).__name__ == "settle":
            self.refusals -= 1
            raise WriterUnavailable("The test says no")
        return await super().write(operation, **bounds)


@pytest.fixture
def refusing(tmp_path: Path):
    with running_stack(tmp_path, database_class=RefusingDatabase) as stack:
        yield stack
        stack.wait_until(lambda: stack.open_holds() == [])


def test_a_settlement_that_fails_is_tried_again(refusing: Stack):
    refusing.database.refusals = 2

    response = refusing.post(ASK | {"max_tokens": 2})

    assert split_of(response) == Split(w5=2000, input=30)
    assert_books_agree(refusing, response.headers["request-id"], response.json()["usage"])


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_cannot_be_settled_is_no_success(refusing: Stack, stream: bool):
    refusing.database.refusals = 4

    if stream:
        with refusing.stream(ASK | {"max_tokens": 2}) as response:
            last = list(read_events(response))[-1]
    else:
        response = refusing.post(ASK | {"max_tokens": 2})
        assert response.status_code == 529
        last = response.json()

    assert last["error"]["type"] == "overloaded_error"
    record = wait_recovered(refusing, last["request_id"])
    assert_free(record)
    assert record["engine"]["output_tokens"] == 2
    assert split_of(refusing.post(ASK | {"max_tokens": 2})) == Split(w5=2000, input=30)


def test_a_whole_message_of_a_killed_gateway_costs_nothing(stack: Stack):
    with stack.in_background(ASK) as answer:
        stack.wait_until(lambda: stack.runner.num_steps > 4)
        (request_id,) = stack.open_holds()
        stack.kill_gateway()
    assert answer.exception() is not None or answer.result().is_error

    stack.start_gateway(boot_id="gw_two")

    record = wait_recovered(stack, request_id)
    assert (record["status"], record["postings"]) == ("failed", [])
    assert record["engine"]["output_tokens"] > 0


def test_a_hold_that_cannot_be_read_stops_the_recovery_of_no_other(stack: Stack):
    readers = [Reader(stack, ASK) for _ in range(2)]
    stack.kill_gateway()
    for reader in readers:
        reader.end()
    poisoned, sound = stack.open_holds()
    damage = f"UPDATE holds SET writes = 'garbage' WHERE request_id = '{poisoned}'"
    stack.database.write_now(lambda conn: conn.exec_driver_sql(damage))

    stack.start_gateway(boot_id="gw_two")

    assert_free(wait_recovered(stack, sound))
    record = wait_recovered(stack, poisoned)
    assert (record["status"], record["charged_nanos"]) == ("released", "0")


class LateDatabase(RefusingDatabase):
    """Makes entries live only once `engine_is_done`: it ends before it hears of a stop string."""

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url, **options)
        self.engine_is_done = threading.Event()

    async def write(self, operation: Callable[[Connection], Any], **bounds: Any) -> Any:
        if getattr(operation, "func", None).__name__ == "activate":
            await asyncio.to_thread(self.engine_is_done.wait, 20)
        return await super().write(operation, **bounds)


@pytest.fixture
def late(tmp_path: Path):
    with running_stack(tmp_path, database_class=LateDatabase) as stack:
        yield stack
        stack.wait_until(lambda: stack.open_holds() == [])


def test_what_follows_a_stop_string_costs_nothing_though_the_engine_never_heard(late: Stack):
    body = ASK | {"max_tokens": 5, "stop_sequences": ["two"], "stream": True}
    with late.in_background(body) as answer:
        late.wait_until(lambda: late.runner.num_steps > 0 and not late.engine.core.has_work)
        late.database.engine_is_done.set()

    assert "event: error" not in answer.result().text
    record = wait_recovered(late, answer.result().headers["request-id"])
    assert record["usage"]["output_tokens"] == 2
    assert (record["engine"]["output_tokens"], record["engine"]["overrun_tokens"]) == (2, 3)
    assert record["engine"]["finish_reason"] == "max_tokens"
