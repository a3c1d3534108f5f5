"""Streams: the order of their events, silence, stop strings, failures, clients that leave."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.books import assert_books_agree
from tests.gateway.stack import Stack, complete, running_stack, word_config
from tests.gateway.talk import Split, read_events, split_of, split_of_usage, text, user
from tests.gateway.words import END_OF_TURN

SYSTEM = [text(2000, "s", ttl="5m")]


@pytest.fixture
def stack(tmp_path: Path):
    with running_stack(tmp_path, settings={"ping_seconds": 0.05}) as stack:
        yield stack
        stack.wait_until(lambda: stack.open_holds() == [])


def events_of(stack: Stack, body: dict[str, Any]) -> list[dict[str, Any]]:
    with stack.stream(body) as response:
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-cache"
        return list(read_events(response))


def ask(content: int | str = 30, **body: Any) -> dict[str, Any]:
    return {"messages": [user(text(content, "u"))], **body}


def wait_ended(stack: Stack, request_id: str, *, seconds: float = 20) -> dict[str, Any]:
    """The record of a request whose client has gone, once it has ended."""
    stack.wait_until(lambda: stack.record(request_id)["status"] != "in_progress", seconds=seconds)
    return assert_books_agree(stack, request_id)


def test_m22_a_stream_says_what_a_whole_message_says(stack: Stack):
    stack.post(ask(system=SYSTEM))

    events = events_of(stack, ask(system=SYSTEM))
    whole = stack.post(ask(system=SYSTEM))

    assert [event["type"] for event in events][:3] == [
        "message_start",
        "content_block_start",
        "ping",
    ]
    assert [event["type"] for event in events if event["type"] != "ping"] == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 5,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start = events[0]["message"]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert split_of_usage(start["usage"]) == split_of(whole) == Split(read=2000, input=30)
    assert start["usage"]["output_tokens"] == 0
    end = next(event for event in events if event["type"] == "message_delta")
    assert end["delta"]["stop_reason"] == whole.json()["stop_reason"] == "max_tokens"
    usage = whole.json()["usage"]
    assert end["usage"] == {name: usage[name] for name in end["usage"]}
    assert start["usage"] | end["usage"] == usage
    deltas = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(deltas) == whole.json()["content"][0]["text"] == "one two three four five "


def test_the_books_of_a_stream_are_closed_when_its_last_event_leaves(stack: Stack):
    with stack.stream(ask(system=SYSTEM)) as response:
        for event in read_events(response):
            if event["type"] == "message_start":
                start = event["message"]["usage"]
            if event["type"] == "message_delta":
                usage = start | event["usage"]
                assert_books_agree(stack, response.headers["request-id"], usage)


def test_m23_an_engine_that_fails_ends_the_stream_with_an_error(stack: Stack):
    stack.runner.fail_after = 3

    events = events_of(stack, ask(system=SYSTEM, max_tokens=9))

    types = [event["type"] for event in events if event["type"] != "ping"]
    assert types == ["message_start", "content_block_start", *["content_block_delta"] * 3, "error"]
    assert events[-1]["error"]["type"] == "api_error"
    record = assert_books_agree(stack, events[-1]["request_id"])
    assert (record["status"], record["engine"]["output_tokens"]) == ("failed", 3)
    assert (record["postings"], split_of_usage(record["usage"])) == ([], Split())


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_fails_before_the_first_token_costs_nothing(stack: Stack, stream: bool):
    stack.runner.fail_after = 0

    if stream:
        events = events_of(stack, ask(system=SYSTEM))
        types = [event["type"] for event in events if event["type"] != "ping"]
        assert types == ["message_start", "error"]
        error = events[-1]
    else:
        response = stack.post(ask(system=SYSTEM))
        assert response.status_code == 500
        error = response.json()

    assert error["error"]["type"] == "api_error"
    record = assert_books_agree(stack, error["request_id"])
    assert (record["status"], record["postings"]) == ("failed", [])
    stack.runner.fail_after = None
    assert split_of(stack.post(ask(system=SYSTEM))) == Split(w5=2000, input=30)


def test_m24_silence_is_filled_with_pings(stack: Stack):
    stack.runner.gate.clear()
    types = []
    # The marker cuts the prompt, so that the engine admits in one step and stalls in the next.
    with stack.stream(ask(system=SYSTEM)) as response:
        for event in read_events(response):
            types.append(event["type"])
            if types == ["message_start", "ping", "ping", "ping"]:
                stack.runner.gate.set()

    assert types[:4] == ["message_start", "ping", "ping", "ping"]
    assert types[-1] == "message_stop"


def test_m25_a_client_that_leaves_pays_for_what_was_produced(stack: Stack):
    stack.runner.pace_seconds = 0.01
    with stack.stream(ask(system=SYSTEM, max_tokens=5000)) as response:
        request_id = response.headers["request-id"]
        num_deltas = 0
        for event in read_events(response):
            num_deltas += event["type"] == "content_block_delta"
            if num_deltas == 3:
                break

    record = wait_ended(stack, request_id, seconds=1)

    produced = record["usage"]["output_tokens"]
    assert record["status"] == "aborted"
    assert 3 <= produced == record["engine"]["output_tokens"] < 200
    assert split_of_usage(record["usage"]) == Split(w5=2000, input=30)
    assert split_of(stack.post(ask(system=SYSTEM))) == Split(read=2000, input=30)


def test_a_client_that_leaves_before_its_whole_message_pays_for_what_was_produced(stack: Stack):
    stack.runner.pace_seconds = 0.01
    stack.leave_early(ask(system=SYSTEM, max_tokens=5000), seconds=1)
    (request_id,) = stack.open_holds()

    record = wait_ended(stack, request_id, seconds=1)

    assert record["status"] == "aborted"
    assert 0 < record["usage"]["output_tokens"] < 200
    assert split_of_usage(record["usage"]) == Split(w5=2000, input=30)


def test_a_client_that_leaves_the_queue_pays_nothing(tmp_path: Path):
    with running_stack(tmp_path, config=word_config(max_num_seqs=1)) as stack:
        stack.runner.gate.clear()
        with stack.in_background(ask(5)):
            stack.wait_until(lambda: stack.runner.num_steps == 1)
            stack.leave_early(ask(6), seconds=0.2)
            stack.wait_until(lambda: len(stack.open_holds()) == 2)
            request_id = stack.open_holds()[1]
            stack.wait_until(lambda: stack.gateway.num_cut == 1)
            stack.runner.gate.set()
        record = wait_ended(stack, request_id)

    assert (record["status"], record["postings"]) == ("released", [])


def test_a_client_that_leaves_after_the_last_event_has_a_completed_request(stack: Stack):
    with stack.stream(ask()) as response:
        request_id = response.headers["request-id"]
        for event in read_events(response):
            if event["type"] == "message_stop":
                break

    assert assert_books_agree(stack, request_id)["status"] == "completed"


@pytest.mark.parametrize("stream", [False, True])
def test_m26_a_stop_string_ends_the_answer_and_is_not_shown(stack: Stack, stream: bool):
    stack.runner.script = stack.words.ids("a b END c d e f g h")
    body = ask(stop_sequences=["END"], max_tokens=9)

    if stream:
        events = events_of(stack, body)
        shown = "".join(e["delta"]["text"] for e in events if e["type"] == "content_block_delta")
        end = next(event for event in events if event["type"] == "message_delta")
        delta, output_tokens = end["delta"], end["usage"]["output_tokens"]
    else:
        delta = stack.post(body).json()
        shown, output_tokens = delta["content"][0]["text"], delta["usage"]["output_tokens"]

    assert shown == "a b "
    assert (delta["stop_reason"], delta["stop_sequence"]) == ("stop_sequence", "END")
    assert output_tokens == 3, "The token that completed the stop string counts, the overrun not."


def test_the_end_of_the_turn_counts_and_shows_nothing(stack: Stack):
    stack.runner.script = [*stack.words.ids("fine thanks"), END_OF_TURN]

    answer = stack.post(ask(max_tokens=9)).json()

    assert answer["content"][0]["text"] == "fine thanks "
    assert (answer["stop_reason"], answer["usage"]["output_tokens"]) == ("end_turn", 3)


def test_an_answer_without_text_has_no_block(stack: Stack):
    stack.runner.script = [END_OF_TURN]

    answer = stack.post(ask()).json()
    types = [event["type"] for event in events_of(stack, ask()) if event["type"] != "ping"]

    assert answer["content"] == []
    assert types == ["message_start", "message_delta", "message_stop"]


def test_a_budget_beyond_the_window_is_clamped(stack: Stack):
    window_tokens = stack.config.max_model_len

    answer = stack.post(ask(window_tokens - 3, max_tokens=1_000_000)).json()

    assert answer["stop_reason"] == "model_context_window_exceeded"
    assert answer["usage"]["output_tokens"] == 3


def test_a_prompt_beyond_the_window_is_refused_and_leaves_nothing(stack: Stack):
    window_tokens = stack.config.max_model_len

    response = stack.post(ask(window_tokens + 1))

    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert message == f"prompt is too long: {window_tokens + 1} tokens > {window_tokens} maximum"
    request_id = response.headers["request-id"]
    assert stack.http().get(f"/v1/kvmeter/requests/{request_id}").status_code == 404


def test_garbage_behind_a_request_ends_its_stream_with_an_error_and_is_the_clients_cut(
    stack: Stack,
):
    stack.runner.pace_seconds = 0.01
    body = json.dumps(complete(ask(system=SYSTEM, max_tokens=5000) | {"stream": True})).encode()
    head = (
        f"POST /v1/messages HTTP/1.1\r\nhost: x\r\nx-api-key: {stack.key}\r\n"
        f"anthropic-version: 2023-06-01\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    received = b""
    with socket.create_connection(("127.0.0.1", int(stack.url.rpartition(":")[2]))) as line:
        line.sendall(head.encode() + body)
        while received.count(b"content_block_delta") < 6:
            received += line.recv(65_536)
        line.sendall(b"\x16\x03\x01 no request\r\n\r\n")
        while more := line.recv(65_536):
            received += more

    assert b"event: error" in received
    stack.wait_until(lambda: stack.open_holds() == [])
