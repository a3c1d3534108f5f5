"""The streaming cases M22 to M26 of the Messages API, through both SDKs."""

import httpx
import pytest
from tests.system.word_stack import WordStack

from tests.sdk.versions import SdkError
from tests.system.conversation import MODEL, Conversation, Usage, read_usage, text, user, words


def test_m22_a_stream_tells_what_a_message_tells(stack: WordStack, talk: Conversation) -> None:
    system = [text(2000, "s", ttl="5m")]
    talk.usage(system=system, messages=[user(words(20, "u"))])
    body = {"model": MODEL, "max_tokens": 5, "system": system, "messages": [user(words(30, "v"))]}

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
    assert read_usage(start["usage"]) == Usage(read=2000, input=30)
    for name in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"):
        assert start["usage"][name] == end["usage"][name]
    assert end["usage"]["output_tokens"] == 5
    assert assembled["usage"] == whole["usage"]
    assert assembled["content"] == whole["content"]


def test_m23_an_engine_that_fails_ends_the_stream_with_an_error(
    stack: WordStack, talk: Conversation
) -> None:
    stack.runner.fails_at = 3

    with pytest.raises(SdkError) as failed:
        talk.call("stream", model=MODEL, max_tokens=9, messages=[user("hello")])

    assert failed.value.type in {"api_error", "overloaded_error"}
    request_id = stack.last_request_id()
    record = stack.record(talk, request_id)
    assert record["usage"]["output_tokens"] == 3
    with stack.http(talk) as client:
        stack.runner.fails_at = 3
        raw = client.post(
            "/v1/messages",
            json={"model": MODEL, "max_tokens": 9, "stream": True, "messages": [user("hello")]},
        ).text
    assert "event: error" in raw
    assert "message_stop" not in raw


def test_m24_silence_before_the_first_token_is_filled_with_pings(
    stack: WordStack, talk: Conversation
) -> None:
    body = {"model": MODEL, "max_tokens": 5, "stream": True, "messages": [user("hello")]}

    pings = 0
    with stack.runner.gate.closed(), stack.http(talk) as client:
        stack.runner.gate.open_after(pings=3)
    assert pings >= 3
    del body


def test_m25_a_client_that_leaves_pays_for_what_was_produced(
    stack: WordStack, talk: Conversation
) -> None:
    system = [text(1000, "s", ttl="5m")]
    stack.runner.gate.close_after(steps=4)

    left = talk.call(
        "stream",
        model=MODEL,
        max_tokens=5000,
        system=system,
        messages=[user(words(20, "u"))],
        close_after=2,
    )
    request_id = left["headers"]["request-id"]
    stack.runner.gate.open()

    record = stack.wait_settled(talk, request_id, seconds=1)
    produced = record["engine"]["output_tokens"]
    assert 2 <= produced < 5000
    assert record["usage"]["output_tokens"] == produced
    assert read_usage(record["usage"]) == Usage(w5=1000, input=20)
    assert talk.usage(system=system, messages=[user("again")]) == Usage(read=1000, input=1)


@pytest.mark.parametrize("stream", [False, True])
def test_m26_a_stop_string_ends_the_answer_and_is_not_shown(
    stack: WordStack, talk: Conversation, stream: bool
) -> None:
    stack.runner.script = ["a ", "b ", "END ", "c "]

    call = "stream" if stream else "create"
    message = talk.call(
        call, model=MODEL, max_tokens=9, stop_sequences=["END"], messages=[user("hello")]
    )["message"]

    assert message["content"][0]["text"] == "a b "
    assert message["stop_reason"] == "stop_sequence"
    assert message["stop_sequence"] == "END"


assert httpx
