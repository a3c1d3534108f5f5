import json

import pytest
from pydantic import ValidationError

from gateway.errors import InvalidRequest
from gateway.http.validation import read_body
from gateway.wire.request import MAX_BLOCKS, MessagesRequest
from tests.gateway.bodies import EPHEMERAL, body, read, text, turn

NOT_YET = "This server does not support this field yet"


def test_a_null_optional_field_is_an_absent_one() -> None:
    optional = [
        name for name, field in MessagesRequest.model_fields.items() if not field.is_required()
    ]
    nulls = dict.fromkeys(optional)

    assert "cache_control" in nulls
    assert read(**nulls) == read()
    assert read("2026-10-21", **nulls) == read("2026-10-21")


def test_a_string_is_one_text_block() -> None:
    assert read(system="Be brief.") == read(system=[text("Be brief.")])
    assert read() == read(messages=[turn("user", text("Hi there"))])


def test_what_the_sdk_passes_back_is_accepted() -> None:
    passed_back = turn("assistant", text("Hello", citations=None))

    request = read(messages=[turn("user", text("Hi")), passed_back, turn("user", text("Go on"))])

    assert request.messages[1].text_blocks[0].citations is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"colour": 1}, "colour: Extra inputs are not permitted"),
        ({"max_tokens": "8"}, "max_tokens: Input should be a valid integer"),
        ({"max_tokens": True}, "max_tokens: Input should be a valid integer"),
        ({"max_tokens": -1}, "max_tokens: Input should be greater than or equal to 0"),
        ({"stream": "yes"}, "stream: Input should be a valid boolean"),
        ({"stop_sequences": [""]}, "stop_sequences.0: String should have at least 1 character"),
        ({"temperature": 1.5}, "temperature: Input should be less than or equal to 1"),
        ({"top_p": 0}, "top_p: Input should be greater than 0"),
        ({"top_k": 2**31}, "top_k: Input should be less than or equal to 2147483647"),
        ({"messages": 5}, "messages: Input should be a valid array"),
        (
            {"messages": [{"role": "user", "content": 5}]},
            "messages.0.content: Input should be a valid string or list",
        ),
        (
            {"messages": [{"role": "tool", "content": "x"}]},
            "messages.0.role: Input should be 'user', 'assistant' or 'system'",
        ),
        (
            {"messages": [{"role": "user", "content": "x", "cache_control": EPHEMERAL}]},
            "messages.0.cache_control: Extra inputs are not permitted",
        ),
        (
            {"system": [text("x", cache_control={"type": "ephemeral", "ttl": "2h"})]},
            "system.0.cache_control.ttl: Input should be '5m' or '1h'",
        ),
        (
            {"messages": [turn("user", text("x", cache_control={"type": "ephemeral", "at": 1}))]},
            "messages.0.content.0.text.cache_control.at: Extra inputs are not permitted",
        ),
    ],
)
def test_a_fault_is_named_by_its_path(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read(**fields)

    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": [{"name": "x", "input_schema": {}}]}, f"tools: {NOT_YET}"),
        ({"tool_choice": {"type": "any"}}, f"tool_choice: {NOT_YET}"),
        (
            {"output_config": {"format": {"type": "json_schema"}}},
            f"output_config.format: {NOT_YET}",
        ),
        ({"inference_geo": "us"}, f"inference_geo: {NOT_YET}"),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            "thinking.type: Input should be 'disabled'",
        ),
        ({"speed": "fast"}, "speed: Input should be 'standard'"),
        (
            {"messages": [turn("user", {"type": "image", "source": {"type": "url", "url": "x"}})]},
            "messages.0.content.0.image: This server does not support image blocks yet",
        ),
        (
            {"messages": [turn("user", text("x", citations=[{"type": "char_location"}]))]},
            f"messages.0.content.0.text.citations: {NOT_YET}",
        ),
    ],
)
def test_what_is_not_supported_yet_is_refused_by_name(
    fields: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read(**fields)

    assert str(refused.value) == message


def test_an_empty_list_of_something_unsupported_is_nothing() -> None:
    assert read(tools=[]).tools is None


def test_a_marker_on_thinking_is_refused_in_the_apis_words() -> None:
    thinking = {"type": "thinking", "thinking": "hm", "signature": "s"}

    with pytest.raises(InvalidRequest, match=r"0\.thinking: This server does not support"):
        read(messages=[turn("assistant", thinking)])
    with pytest.raises(
        InvalidRequest, match=r"0\.thinking\.cache_control: Extra inputs are not permitted"
    ):
        read(messages=[turn("assistant", thinking | {"cache_control": EPHEMERAL})])


@pytest.mark.parametrize("field", ["temperature", "top_p", "top_k"])
def test_sampling_fields_ended_with_the_newer_version(field: str) -> None:
    assert getattr(read("2023-06-01", **{field: 1}), field) == 1
    assert getattr(read("2026-10-21", **{field: None}), field) is None

    with pytest.raises(InvalidRequest) as refused:
        read("2026-10-21", **{field: 1})

    assert str(refused.value) == f"{field}: Extra inputs are not permitted"


def test_max_tokens_is_required() -> None:
    without = {name: value for name, value in body().items() if name != "max_tokens"}

    with pytest.raises(InvalidRequest) as refused:
        read_body(MessagesRequest, json.dumps(without).encode(), version="2023-06-01")

    assert str(refused.value) == "max_tokens: Field required"


@pytest.mark.parametrize("bad", [b"", b"{", b"\xff{}", b'{"a": "\\ud800"}', b"[" * 100_000])
def test_malformed_json_is_an_invalid_request(bad: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"^Invalid JSON: "):
        read_body(MessagesRequest, bad, version="2023-06-01")


@pytest.mark.parametrize(
    "body",
    [
        b'{"system": [' + b"0," * 500_000 + b"0]}",
        b'{"stop_sequences": [' + b"0," * 500_000 + b"0]}",
        b"{" + b",".join(b'"%x": 1' % i for i in range(200_000)) + b"}",
        b'{"system": [{%s}]}' % b",".join(b'"%x": 1' % i for i in range(200_000)),
        b'{"messages": [{"role": "user", "content": [{"type": "thinking", %s}]}]}'
        % b",".join(b'"%x": 1' % i for i in range(200_000)),
    ],
    ids=["system", "stop_sequences", "unknown fields", "unknown fields of a block", "thinking"],
)
def test_a_body_full_of_faults_makes_only_a_few_errors(body: bytes) -> None:
    with pytest.raises(ValidationError) as refused:
        MessagesRequest.model_validate_json(body, strict=True, context={"version": "2023-06-01"})

    assert refused.value.error_count() < 10


def test_system_blocks_are_bounded_though_they_may_be_empty() -> None:
    with pytest.raises(InvalidRequest, match="more than 10000 content blocks"):
        read(system=[text("")] * MAX_BLOCKS)
