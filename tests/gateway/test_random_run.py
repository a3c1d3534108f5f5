"""Hundreds of requests of every kind at once: afterwards every number agrees with every other."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from billing import reports
from billing.meters import Meter
from billing.verification import verify
from tests.gateway.books import assert_books_agree
from tests.gateway.stack import Stack, running_stack, word_config
from tests.gateway.talk import read_events, split_of_usage, text, user
from tests.postgres import postgres_server

NUM_CLIENTS = 4


@dataclass
class Client:
    """Sends its share of the requests, one after another, and keeps what it was told."""

    stack: Stack
    random: Random
    answers: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)

    def run(self, num_requests: int) -> "Client":
        for _ in range(num_requests):
            if self.random.random() < 0.1:
                self.stack.clock.advance(self.random.choice([1_000, 20_000]))
            body = self._body()
            if self.random.random() < 0.5:
                self._stream(body)
            else:
                response = self.stack.post(body)
                assert response.status_code == 200, response.text
                self._keep(response, response.json()["usage"])
        return self

    def _body(self) -> dict[str, Any]:
        """A prompt of a few shared blocks, marked here and there, long class first."""
        blocks = [
            text(self.random.choice([40, 100, 250]), f"b{i}{self.random.choice('xy')}.")
            for i in range(self.random.randint(1, 8))
        ]
        marked = sorted(self.random.sample(range(len(blocks)), min(len(blocks), 2)))
        for at, index in enumerate(marked[: self.random.randint(0, 2)]):
            ttl = "1h" if at == 0 and self.random.random() < 0.3 else "5m"
            blocks[index]["cache_control"] = {"type": "ephemeral", "ttl": ttl}
        body: dict[str, Any] = {
            "messages": [user(*blocks)],
            "max_tokens": self.random.choice([1, 3, 8, 40]),
        }
        if self.random.random() < 0.3:
            body["stop_sequences"] = ["four"]
        return body

    def _stream(self, body: dict[str, Any]) -> None:
        patience = self.random.choice([1, 2, 4, 1_000, 1_000])  # events until the client leaves
        usage: dict[str, Any] | None = None
        start: dict[str, Any] = {}
        if patience < 1_000:
            body |= {"max_tokens": 300}  # long enough that its leaving is noticed before the end
        with self.stack.stream(body) as response:
            for seen, event in enumerate(read_events(response), start=1):
                if event["type"] == "message_start":
                    start = event["message"]["usage"]
                if event["type"] == "message_delta":
                    usage = start | event["usage"]
                if seen == patience:
                    break
            self._keep(response, usage)

    def _keep(self, response: httpx.Response, usage: dict[str, Any] | None) -> None:
        self.answers[response.headers["request-id"]] = usage
        self.headers[response.headers["request-id"]] = response.headers["x-kvmeter-cache"]


def run_clients(stack: Stack, num_requests: int) -> list[Client]:
    clients = [Client(stack, Random(seed)) for seed in range(NUM_CLIENTS)]
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        return list(pool.map(lambda client: client.run(num_requests // NUM_CLIENTS), clients))


def assert_all_agree(stack: Stack, clients: list[Client]) -> Counter[str]:
    """Every request's books, the report's totals, the ledger itself; counts what happened."""
    stack.wait_until(lambda: stack.open_holds() == [])
    totals: Counter[str] = Counter()
    happened: Counter[str] = Counter()
    for client in clients:
        for request_id, usage in client.answers.items():
            record = assert_books_agree(stack, request_id, usage)
            happened[record["status"]] += 1
            happened["refused"] += bool(record["refused"])
            happened["read"] += record["usage"]["cache_read_input_tokens"] > 0
            totals.update({p["meter"]: int(p["quantity"]) for p in record["postings"]})
            refused = ",".join(f"{r['reason']}@{r['tokens']}" for r in record["refused"])
            split = split_of_usage(record["usage"])
            header = f"read={split.read}; write_5m={split.w5}; write_1h={split.w1h}"
            if record["status"] == "completed":
                expected = f"{header}; refused={refused}" if refused else header
                assert client.headers[request_id] == expected
    (row,) = stack.database.read_now(reports.usage)
    assert {m.value: row.quantities[m] for m in Meter if row.quantities[m]} == totals
    assert stack.database.read_now(verify).problems == ()
    return happened


@pytest.fixture(scope="module")
def new_postgres():
    with postgres_server() as new_database:
        yield new_database


@pytest.mark.parametrize(("dialect", "num_requests"), [("sqlite", 200), ("postgresql", 60)])
def test_a_random_run_leaves_books_that_agree(
    tmp_path: Path, request: pytest.FixtureRequest, dialect: str, num_requests: int
):
    url = request.getfixturevalue("new_postgres")() if dialect == "postgresql" else None
    config = word_config(num_blocks=512, max_model_len=2_048, pin_cap_blocks=160, max_num_seqs=3)
    with running_stack(
        tmp_path, config=config, database_url=url, settings={"cache_min_tokens": 64}
    ) as stack:
        happened = assert_all_agree(stack, run_clients(stack, num_requests))

    assert happened["completed"] > num_requests / 2
    for kind in ("aborted", "refused", "read"):
        assert happened[kind] > 0, happened
