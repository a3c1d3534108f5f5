"""Two gateways on one database and one engine: each closes its own holds, and a dead one's."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from billing.owners import end_owner, running_owners
from billing.verification import verify
from tests.gateway.books import assert_books_agree
from tests.gateway.stack import Serving, Stack, complete, running_stack
from tests.gateway.talk import Split, read_events, split_of, split_of_usage, text, user
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


class Customer:
    """Sends requests to whichever gateway serves, and keeps what came back whole."""

    def __init__(self, stack: Stack, seed: int) -> None:
        self.usages: dict[str, dict[str, Any]] = {}
        self.request_ids: set[str] = set()
        self._stack = stack
        self._random = Random(seed)

    def run(self, urls: dict[str, str], stopped: threading.Event) -> "Customer":
        headers = {"x-api-key": self._stack.key, "anthropic-version": "2023-06-01"}
        with httpx.Client(headers=headers, timeout=20) as http:
            while not stopped.is_set():
                url = self._random.choice(list(urls.values()))
                with suppress(httpx.TransportError):  # it was killed
                    self._ask(http, url)
        return self

    def _ask(self, http: httpx.Client, url: str) -> None:
        body: dict[str, Any] = {
            "system": [text(200, f"s{self._random.randint(0, 3)}.", ttl="5m")],
            "messages": [user(text(20, "u"))],
            "max_tokens": self._random.choice([1, 5, 40]),
        }
        if self._random.random() < 0.5:
            response = http.post(f"{url}/v1/messages", json=complete(body))
            if response.status_code == 200:
                self._keep(response, response.json()["usage"])
            return
        streamed = complete(body) | {"stream": True}
        with http.stream("POST", f"{url}/v1/messages", json=streamed) as response:
            if response.status_code != 200:
                return
            self.request_ids.add(response.headers["request-id"])
            usage: dict[str, Any] = {}
            for event in read_events(response):
                match event["type"]:
                    case "message_start":
                        usage = event["message"]["usage"]
                    case "message_delta":
                        usage = usage | event["usage"]
                    case "message_stop":
                        self._keep(response, usage)

    def _keep(self, response: httpx.Response, usage: dict[str, Any]) -> None:
        self.request_ids.add(response.headers["request-id"])
        self.usages[response.headers["request-id"]] = usage


def test_books_agree_after_kills_and_rolling_restarts_of_either(tmp_path: Path):
    settings = {"gateway_dead_after_seconds": 1.2, "cache_min_tokens": 64}
    random = Random(9)
    with running_stack(tmp_path, settings=settings) as stack:
        stack.runner.pace_seconds = 0.002
        gateways = {"one": stack.gateway}
        urls = {"one": stack.url}
        stopped = threading.Event()
        with ThreadPoolExecutor(4) as pool:
            running = [pool.submit(Customer(stack, seed).run, urls, stopped) for seed in range(4)]
            try:
                for number in range(8):
                    name = ("two", "one")[number % 2]
                    if name in gateways:
                        del urls[name]
                        end = gateways[name].kill if random.random() < 0.6 else gateways[name].stop
                        end()
                    stack.start_gateway(boot_id=f"gw_{number}", instance=name)
                    gateways[name], urls[name] = stack.gateway, stack.url
                    time.sleep(0.3)
            finally:
                stopped.set()
        customers = [future.result() for future in running]
        stack.wait_until(lambda: stack.open_holds() == [])
        ended = [assert_books_agree(stack, i) for c in customers for i in c.request_ids]
        for customer in customers:
            for request_id, usage in customer.usages.items():
                record = assert_books_agree(stack, request_id, usage)
                assert record["status"] == "completed"
        for record in ended:
            assert record["postings"] or record["status"] == "failed"
        assert stack.database.read_now(verify).problems == ()
        for gateway in gateways.values():
            if gateway is not stack.gateway:
                gateway.stop()
    assert sum(len(customer.usages) for customer in customers) > 20
