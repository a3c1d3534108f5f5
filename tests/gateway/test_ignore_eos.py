"""`x-kvmeter-ignore-eos`: outputs of a fixed length, counted and billed like any other."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.books import assert_books_agree
from tests.gateway.stack import Stack, complete, running_stack
from tests.gateway.talk import text, user
from tests.gateway.words import END_OF_TURN


@pytest.fixture
def stack(tmp_path: Path):
    with running_stack(tmp_path) as stack:
        words = stack.words.ids
        stack.runner.script = [*words("one"), END_OF_TURN, *words("two"), END_OF_TURN, *words("x")]
        yield stack
        assert stack.open_holds() == []


def ask(stack: Stack, header: str | None, **body: Any) -> httpx.Response:
    headers = {} if header is None else {"x-kvmeter-ignore-eos": header}
    body = complete({"messages": [user(text(20))], "max_tokens": 9, **body})
    return stack.http().post("/v1/messages", json=body, headers=headers)


def test_the_output_is_as_long_as_its_budget_and_is_paid_for(stack: Stack):
    response = ask(stack, "1")

    answer = response.json()
    assert answer["content"][0]["text"] == "one two " + "x " * 5
    assert (answer["stop_reason"], answer["usage"]["output_tokens"]) == ("max_tokens", 9)
    record = assert_books_agree(stack, response.headers["request-id"], answer["usage"])
    assert record["postings"][-1]["quantity"] == "9"


@pytest.mark.parametrize("header", [None, "0"])
def test_without_it_the_model_ends_its_turn(stack: Stack, header: str | None):
    answer = ask(stack, header).json()

    assert (answer["stop_reason"], answer["usage"]["output_tokens"]) == ("end_turn", 2)


def test_a_stop_string_still_ends_the_answer(stack: Stack):
    answer = ask(stack, "1", stop_sequences=["two"]).json()

    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "two")
    assert answer["usage"]["output_tokens"] == 3


@pytest.mark.parametrize("header", ["", "2", "true", "1, 1"])
def test_any_other_value_is_refused(stack: Stack, header: str):
    response = ask(stack, header)

    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert message == f"x-kvmeter-ignore-eos: {header} is not one of 0, 1"
