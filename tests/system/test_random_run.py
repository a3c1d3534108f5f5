"""A long random run over real processes: every number that a customer sees is the same number."""

import json
import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.talk import Split, split_of_usage
from tests.postgres import postgres_server
from tests.system.installation import Installation, wait_until
from tests.system.random_requests import Outcome, Tenant, random_ask

THREADS = 8
SEED = 7

# One context of 4,096 tokens is never pinned, so 1,904 are: too few for everybody's books.
POOL_TOKENS = 6_000
BYTES_PER_TOKEN = 4 * 2 * 2 * 8 * 4  # the tiny model's layers, K and V, heads, head size, fp32

METERS = ("input", "cache_read", "cache_write_5m", "cache_write_1h", "output")


@pytest.fixture(scope="module")
def postgres_url() -> Iterator[str]:
    with postgres_server() as new_database:
        yield new_database()


@pytest.mark.parametrize(("database", "num_requests"), [("sqlite", 500), ("postgresql", 150)])
def test_wire_ledger_engine_and_report_tell_one_story(
    tmp_path: Path,
    tiny_model: Path,
    tiny_cards: Path,
    request: pytest.FixtureRequest,
    database: str,
    num_requests: int,
) -> None:
    settings = {}
    if database == "postgresql":
        settings["KVMETER_DATABASE_URL"] = request.getfixturevalue("postgres_url")
    installation = Installation(
        tmp_path / "data",
        model=tiny_model,
        flags=["--kv-cache-memory", str(POOL_TOKENS * BYTES_PER_TOKEN)],
        KVMETER_DTYPE="float32",
        KVMETER_PRICE_CARDS=str(tiny_cards),
        KVMETER_CACHE_MIN_TOKENS="32",
        KVMETER_CACHE_TTL_5M_SECONDS="1",
        KVMETER_CACHE_TTL_1H_SECONDS="5",
        **settings,
    )
    with installation:
        tenants = make_tenants(installation)
        chance = random.Random(SEED)
        asks = [random_ask(chance, tenants) for _ in range(num_requests)]
        with ThreadPoolExecutor(THREADS) as threads:
            outcomes = list(threads.map(lambda ask: ask.send(installation), asks))
        wait_until(lambda: not verified(installation)["open_holds"], 30)

        records = {
            outcome.request_id: installation.record(outcome.request_id, key=outcome.tenant.api_key)
            for outcome in outcomes
            if outcome.split is not None
        }
        check_variety(outcomes, list(records.values()))
        for outcome in outcomes:
            if outcome.split is not None:
                check_record(outcome, records[outcome.request_id])
        check_report(installation, list(records.values()))
        assert verified(installation)["problems"] == []


def make_tenants(installation: Installation) -> list[Tenant]:
    """Two workspaces of the first organisation, another organisation, and one soon out of money."""
    keys = installation.keys
    first = keys["organization_id"]
    other = installation.run("organizations", "create").strip()
    prepaid = installation.run("organizations", "create", "--prepaid").strip()
    installation.run("organizations", "top-up", prepaid, "--usd", "0.012")
    second_workspace = installation.run("workspaces", "create", "--organization", first).strip()
    made = [
        make_key(installation, first, "--workspace", second_workspace),
        make_key(installation, other),
        make_key(installation, prepaid),
    ]
    return [Tenant(first, keys["api_key"]), *made]


def make_key(installation: Installation, organization: str, *options: str) -> Tenant:
    printed = installation.run("keys", "create", "--organization", organization, *options, "--json")
    return Tenant(organization, json.loads(printed)["secret"])


def verified(installation: Installation) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(installation.run("ledger", "verify", "--json"))
    return found


def check_variety(outcomes: list[Outcome], records: list[dict[str, Any]]) -> None:
    """The run was worth its time: everything that may happen did."""
    statuses = Counter(outcome.status for outcome in outcomes)
    grants = Counter(grant["outcome"] for record in records for grant in record["engine"]["grants"])

    assert statuses.keys() >= {200, 400, 402, 404}
    assert statuses.keys() <= {200, 400, 402, 404}
    assert grants.keys() == {"granted", "refreshed", "refused"}
    assert {record["status"] for record in records} >= {"completed", "aborted"}
    assert any(record["usage"]["cache_read_input_tokens"] for record in records)


def check_record(outcome: Outcome, record: dict[str, Any]) -> None:
    """Wire usage = postings = engine facts, for one request."""
    split, engine = split_of_usage(record["usage"]), record["engine"]
    quantities = {posting["meter"]: int(posting["quantity"]) for posting in record["postings"]}

    assert outcome.split == split
    assert outcome.output_tokens in (None, record["usage"]["output_tokens"])
    assert Split(
        read=quantities.get("cache_read", 0),
        w5=quantities.get("cache_write_5m", 0),
        w1h=quantities.get("cache_write_1h", 0),
        input=quantities.get("input", 0),
    ) == (split if record["postings"] else Split())
    assert quantities.get("output", 0) == record["usage"]["output_tokens"]
    assert 0 not in quantities.values()
    for posting in record["postings"]:
        exact = int(posting["quantity"]) * int(posting["rate_pico"])
        assert int(posting["amount_nanos"]) == (exact + 500) // 1000
    assert split.prompt == engine["prompt_tokens"]
    assert split.prompt == (
        engine["tokens_reused_promised"]
        + engine["tokens_reused_gift"]
        + engine["tokens_read_recomputed"]
        + engine["tokens_computed"]
    )
    assert engine["tokens_reused_promised"] + engine["tokens_read_recomputed"] == split.read


def check_report(installation: Installation, records: list[dict[str, Any]]) -> None:
    """The report's totals are the sums over the records, a workspace at a time."""
    sums: dict[str, Counter[str]] = {}
    for record in records:
        total = sums.setdefault(record["workspace_id"], Counter())
        for posting in record["postings"]:
            total[posting["meter"]] += int(posting["quantity"])
            total["nanos"] += int(posting["amount_nanos"])

    rows = json.loads(installation.run("report", "usage", "--by", "workspace", "--json"))

    for row in rows:
        told = {meter: row["meters"][meter]["quantity"] for meter in METERS}
        total = sums.pop(row["workspace"])
        assert told == {meter: total[meter] for meter in METERS}
        assert int(row["total_nanos"]) == total["nanos"]
    assert not sums
