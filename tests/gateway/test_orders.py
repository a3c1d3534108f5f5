"""What is refused, by whom, and that a refusal leaves neither a hold nor a charge nor an entry."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import func, select

from billing.ledger import top_up
from billing.tables import cache_entries
from engine.client import Sampling
from tests.gateway.books import assert_books_agree
from tests.gateway.stack import Stack, running_stack, word_config
from tests.gateway.talk import Split, split_of, text, user

SYSTEM = [text(1000, "s", ttl="5m")]
ASK = {"system": SYSTEM, "messages": [user(text(30, "u"))]}
WORST_CASE_NANOS = 1000 * 2_500 + 30 * 2_000 + 5 * 10_000


@pytest.fixture
def stack(tmp_path: Path):
    with running_stack(tmp_path) as stack:
        yield stack
        assert stack.open_holds() == []


def assert_refused(response: httpx.Response, status: int, error_type: str) -> str:
    assert response.status_code == status, response.text
    assert response.json()["error"]["type"] == error_type
    message: str = response.json()["error"]["message"]
    return message


def num_entries(stack: Stack) -> int:
    return stack.database.read_now(
        lambda conn: conn.scalar(select(func.count()).select_from(cache_entries))
    )


def test_open_holds_and_the_age_of_the_oldest_are_measured(stack: Stack):
    stack.runner.gate.clear()
    with stack.in_background(ASK):
        stack.wait_until(lambda: len(stack.open_holds()) == 1)
        stack.clock.advance(30_000)
        scraped = stack.http().get("/metrics").text
        stack.runner.gate.set()

    assert "\nkvmeter_open_holds 1.0\n" in scraped
    assert "\nkvmeter_oldest_open_hold_seconds 30.0\n" in scraped


def test_a_prepaid_balance_below_the_worst_case_is_refused_without_a_trace(stack: Stack):
    key = stack.new_organization("org_prepaid", mode="prepaid")
    stack.database.write_now(
        lambda conn: top_up(
            conn,
            organization_id="org_prepaid",
            amount_nanos=WORST_CASE_NANOS - 1,
            transfer_id="top_1",
            now_ms=stack.now_ms(),
        )
    )

    response = stack.post(ASK, key=key)

    assert_refused(response, 402, "billing_error")
    assert num_entries(stack) == 0
    request_id = response.headers["request-id"]
    assert stack.http(key).get(f"/v1/kvmeter/requests/{request_id}").status_code == 404


def test_a_prepaid_balance_of_the_worst_case_is_enough(stack: Stack):
    key = stack.new_organization("org_prepaid", mode="prepaid")
    stack.database.write_now(
        lambda conn: top_up(
            conn,
            organization_id="org_prepaid",
            amount_nanos=WORST_CASE_NANOS,
            transfer_id="top_1",
            now_ms=stack.now_ms(),
        )
    )

    assert split_of(stack.post(ASK, key=key)) == Split(w5=1000, input=30)


def test_a_full_queue_refuses_and_releases(tmp_path: Path):
    config = word_config(max_num_seqs=1, max_queue=1)
    with running_stack(tmp_path, config=config) as stack, ThreadPoolExecutor(1) as pool:
        stack.runner.pace_seconds = 0.01
        with stack.stream(ASK | {"max_tokens": 5000}):
            waiting = pool.submit(stack.post, ASK)
            stack.wait_until(lambda: len(stack.open_holds()) == 2)

            refused = stack.post(ASK)

            assert_refused(refused, 529, "overloaded_error")
            record = assert_books_agree(stack, refused.headers["request-id"])
            assert (record["status"], record["postings"]) == ("released", [])
        assert split_of(waiting.result()) == Split(read=1000, input=30)
        stack.wait_until(lambda: stack.open_holds() == [])


def test_a_prompt_that_cannot_fit_beside_the_pins_is_too_long(tmp_path: Path):
    config = word_config(num_blocks=200, pin_cap_blocks=100, namespace_quota_blocks=100)
    with running_stack(tmp_path, config=config) as stack:
        message = assert_refused(
            stack.post({"messages": [user(text(1601))]}), 400, "invalid_request_error"
        )
        assert message == "prompt is too long: 1601 tokens > 1600 maximum"
        assert num_entries(stack) == 0


def test_refused_leases_are_plain_input_and_say_so_and_nothing_hangs(tmp_path: Path):
    """Twice as many leases as the cap allows, from several clients at once."""
    config = word_config(
        num_blocks=640, max_model_len=2_048, pin_cap_blocks=320, namespace_quota_blocks=320
    )
    num_prefixes, prefix_tokens = 20, 512  # 32 blocks each: ten of them fill the cap
    with running_stack(tmp_path, config=config) as stack:

        def ask(number: int) -> tuple[Split, httpx.Response]:
            response = stack.post(
                {
                    "system": [text(prefix_tokens, f"p{number}.", ttl="5m")],
                    "messages": [user(text(8, "u"))],
                }
            )
            return split_of(response), response

        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(ask, range(num_prefixes)))
            again = list(pool.map(ask, range(num_prefixes)))

        granted = Split(w5=prefix_tokens, input=8)
        refused = Split(input=prefix_tokens + 8)
        splits = [split for split, _ in answers]
        assert splits.count(granted) == splits.count(refused) == num_prefixes // 2
        for (split, response), (later, _) in zip(answers, again, strict=True):
            record = assert_books_agree(
                stack, response.headers["request-id"], response.json()["usage"]
            )
            header = response.headers["x-kvmeter-cache"]
            if split == granted:
                assert header == f"read=0; write_5m={prefix_tokens}; write_1h=0"
                assert later == Split(read=prefix_tokens, input=8)
            else:
                assert header.startswith("read=0; write_5m=0; write_1h=0; refused=")
                assert header.endswith(f"@{prefix_tokens}")
                assert record["refused"][0]["tokens"] == prefix_tokens
                assert later == refused
        assert stack.open_holds() == []


def test_a_record_is_for_its_own_organisation_only(stack: Stack):
    request_id = stack.post(ASK).headers["request-id"]
    path = f"/v1/kvmeter/requests/{request_id}"
    strangers: list[Any] = [stack.new_organization("org_other")]
    strangers.append(stack.new_key(organization="org_other", kind="admin"))

    for key in (stack.key, stack.admin_key, stack.new_workspace(workspace="wrk_second")):
        assert stack.http(key).get(path).json()["id"] == request_id
    for key in strangers:
        foreign, unknown = (stack.http(key).get(p) for p in (path, path[:-1] + "x"))
        message = assert_refused(foreign, 404, "not_found_error")
        assert message.replace(request_id, "") == unknown.json()["error"]["message"].replace(
            request_id[:-1] + "x", ""
        )
    with httpx.Client(base_url=stack.url) as nobody:
        assert nobody.get(path).status_code == 401


def test_a_request_in_progress_says_so(stack: Stack):
    stack.runner.gate.clear()
    with stack.in_background(ASK):
        stack.wait_until(lambda: stack.runner.num_steps == 2)
        (request_id,) = stack.open_holds()
        record = stack.record(request_id)
        stack.runner.gate.set()

    assert (record["status"], record["postings"], record["engine"]) == ("in_progress", [], None)


def test_sampling_comes_from_the_request_and_else_from_the_model(stack: Stack):
    stack.post(ASK)
    assert stack.runner.sampling == Sampling(temperature=0.0)

    stack.post(ASK | {"temperature": 0.5, "top_k": 3})
    assert stack.runner.sampling == Sampling(temperature=0.5, top_k=3)
