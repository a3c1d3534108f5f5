import json

import anthropic
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import InvalidRequest, error_body
from gateway.wire.events import (
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    DeltaUsage,
    Event,
    MessageDelta,
    MessageStart,
    MessageStop,
    Ping,
    StopDelta,
    TextDelta,
    encode,
    encode_text_delta,
)
from gateway.wire.response import CacheCreation, Message, Usage

USAGE = Usage(
    input_tokens=1,
    cache_creation_input_tokens=5,
    cache_read_input_tokens=4,
    cache_creation=CacheCreation(ephemeral_5m_input_tokens=2, ephemeral_1h_input_tokens=3),
    output_tokens=0,
)
EMPTY = Message(
    id="msg_1", model="wt", content=(), stop_reason=None, stop_sequence=None, usage=USAGE
)
EVENTS: list[Event] = [
    MessageStart(message=EMPTY),
    ContentBlockStart(index=0),
    Ping(),
    ContentBlockDelta(index=0, delta=TextDelta(text="line\nline é")),
    ContentBlockStop(index=0),
    MessageDelta(
        delta=StopDelta(stop_reason="end_turn", stop_sequence=None),
        usage=DeltaUsage(
            input_tokens=1,
            cache_creation_input_tokens=5,
            cache_read_input_tokens=4,
            output_tokens=7,
        ),
    ),
    MessageStop(),
    error_body(InvalidRequest("x"), request_id="req_1"),
]


def test_a_record_is_named_by_its_data() -> None:
    for event in EVENTS:
        name, data, *end = encode(event).decode().split("\n")

        assert name == f"event: {event.type}"
        assert json.loads(data.removeprefix("data: "))["type"] == event.type
        assert end == ["", ""]


def test_a_message_is_what_the_sdk_expects_with_every_field_present() -> None:
    sent = EMPTY.model_dump()

    message = anthropic.types.Message.model_validate(sent)

    assert message.usage.cache_creation is not None
    assert message.usage.cache_creation.ephemeral_1h_input_tokens == 3
    assert {"stop_reason", "stop_sequence", "stop_details"} <= set(sent)


def test_an_error_without_details_does_not_mention_them() -> None:
    plain = error_body(InvalidRequest("x", path="a.0"), request_id="req_1").model_dump()
    coded = error_body(InvalidRequest("x", error_code="c"), request_id="req_1").model_dump()

    assert plain["error"] == {"type": "invalid_request_error", "message": "a.0: x"}
    assert coded["error"]["details"] == {"error_code": "c"}


@given(st.text(st.characters(exclude_categories=["Cs"])), st.integers(0, 9))
def test_a_text_delta_is_written_as_pydantic_would(text: str, index: int) -> None:
    event = ContentBlockDelta(index=index, delta=TextDelta(text=text))

    assert encode_text_delta(index, text) == encode(event)
