"""The streaming cases M22 to M26 of docs/cases/messages-api.md, through both SDKs."""

import pytest

from tests.gateway.stack import MODEL, Stack
from tests.gateway.talk import Split, split_of_usage, text, user
from tests.sdk.versions import SdkError
from tests.system.conversation import Conversation


def test_m22_a_stream_tells_what_a_message_tells(stack: Stack, talk: Conversation) -> None:
    system = [text(2000, "s", ttl="5m")]
    talk.split(system=system, messages=[user(text(20, "u"))])
    body = {"model": MODEL, "max_tokens": 5, "system": system, "messages": [user(text(30, "v"))]}

    events = talk.call("events", **body)["events"]
    assembled = talk.call("stream", **body)["message"]
    whole = talk.create(**body)["message"]

    assert [event["type"] for event in events if event["type"] != "ping"] == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 5,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start = events[0]["message"]
    end = next(event for event in events if event["type"] == "message_delta")
    assert split_of_usage(start["usage"]) == Split(read=2000, input=30)
    for name in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"):
        assert start["usage"][name] == end["usage"][name]
    assert end["usage"]["output_tokens"] == 5
    assert assembled["usage"] == whole["usage"]
    assert assembled["content"] == whole["content"]


def test_m23_an_engine_that_fails_ends_the_stream_with_an_error(
    stack: Stack, talk: Conversation
) -> None:
    stack.runner.fail_after = 3
    body = {"model": MODEL, "max_tokens": 9, "messages": [user(text("hello"))]}

    with pytest.raises(SdkError) as failed:
        talk.call("stream", **body)
    client = stack.http()
    raw = client.post("/v1/messages", json={**body, "stream": True})

    assert failed.value.class_name == "APIStatusError"
    assert failed.value.type in {"api_error", "overloaded_error"}
    assert "event: error" in raw.text
    assert "message_stop" not in raw.text
    record = stack.record(raw.headers["request-id"])
    assert (record["engine"]["output_tokens"], record["postings"]) == (3, [])
    assert stack.open_holds() == []


def test_m24_silence_before_the_first_token_is_filled_with_pings(
    stack: Stack, talk: Conversation
) -> None:
    body = {
        "model": MODEL,
        "max_tokens": 5,
        "stream": True,
        # The breakpoint cuts the prompt in two steps: admission comes before the silence.
        "messages": [user(text(600, "u", ttl="5m"), text("hello"))],
    }
    stack.runner.gate.clear()

    names = []
    with stack.http().stream("POST", "/v1/messages", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("event: "):
                names.append(line.removeprefix("event: "))
            if names.count("ping") == 3:
                stack.at(40)
                stack.runner.gate.set()

    assert names[:4] == ["message_start", "ping", "ping", "ping"]
    assert names[-1] == "message_stop"


def test_m25_a_client_that_leaves_pays_for_what_was_produced(
    stack: Stack, talk: Conversation
) -> None:
    system = [text(1000, "s", ttl="5m")]
    stack.runner.pace_seconds = 0.01  # the whole answer would take 50 s

    left = talk.call(
        "stream",
        model=MODEL,
        max_tokens=5000,
        system=system,
        messages=[user(text(20, "u"))],
        close_after=2,
    )
    request_id = left["headers"]["request-id"]

    stack.wait_until(lambda: not stack.open_holds(), seconds=1)
    record = stack.record(request_id)
    assert record["status"] == "aborted"
    assert 2 <= record["usage"]["output_tokens"] < 200
    assert record["usage"]["output_tokens"] == record["engine"]["output_tokens"]
    assert split_of_usage(record["usage"]) == Split(w5=1000, input=20)
    stack.runner.pace_seconds = 0
    assert talk.split(system=system, messages=[user(text("again"))]) == Split(read=1000, input=1)


@pytest.mark.parametrize("stream", [False, True])
def test_m26_a_stop_string_ends_the_answer_and_is_not_shown(
    stack: Stack, talk: Conversation, stream: bool
) -> None:
    stack.runner.script = stack.words.ids("a b END c")

    call = "stream" if stream else "create"
    message = talk.call(
        call, model=MODEL, max_tokens=9, stop_sequences=["END"], messages=[user(text("hello"))]
    )["message"]

    assert message["content"][0]["text"] == "a b "
    assert message["stop_reason"] == "stop_sequence"
    assert message["stop_sequence"] == "END"
