"""Validating piece by piece finds what validating at once finds."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from gateway.errors import InvalidRequest
from gateway.http.validation import BLOCKS_AT_ONCE, read_body
from gateway.wire.request import MAX_BLOCKS, MessagesRequest
from tests.gateway.bodies import EPHEMERAL, body, text, turn

blocks = st.sampled_from(
    [text("a"), text("b", cache_control=EPHEMERAL), text(""), {"type": "image"}, {}, 5, text(5)]  # type: ignore[arg-type]
)
contents = st.just("hello") | st.just(5) | st.lists(blocks, max_size=3)
messages = st.lists(
    st.builds(lambda c: {"role": "user", "content": c}, contents) | st.just(5), max_size=3
)
fields = st.fixed_dictionaries(
    {},
    optional={
        "messages": messages | st.none() | st.just("x"),
        "system": contents | st.none(),
        "model": st.just(5),
        "max_tokens": st.just(-1),
        "temperature": st.just(float("nan")),
        "tools": st.sampled_from([[], None, [[]]]),
        "colour": st.just(1),
        "top_k": st.just(10**30),
    },
)


def at_once(sent: bytes) -> MessagesRequest | str:
    try:
        return MessagesRequest.model_validate_json(
            sent, strict=True, context={"version": "2023-06-01"}
        )
    except ValidationError as error:
        return str(error.errors()[0]["msg"])


def by_pieces(sent: bytes) -> MessagesRequest | str:
    try:
        return read_body(MessagesRequest, sent, version="2023-06-01")
    except InvalidRequest as error:
        return str(error)


@settings(max_examples=400)
@given(changed=fields)
def test_the_result_or_the_first_fault_is_the_same(changed: dict[str, Any]) -> None:
    sent = json.dumps(body(**changed)).encode()

    found, expected = by_pieces(sent), at_once(sent)

    if isinstance(found, str) and isinstance(expected, str):
        assert found.endswith(expected), "a path stands before it"
    else:
        assert found == expected


def test_many_blocks_are_whole_and_in_order() -> None:
    sent = [text(str(i)) for i in range(3 * BLOCKS_AT_ONCE + 1)]
    request = by_pieces(json.dumps(body(messages=[turn("user", *sent)], system=sent)).encode())

    assert isinstance(request, MessagesRequest)
    expected = tuple(str(i) for i in range(len(sent)))
    assert tuple(block.text for block in request.messages[0].text_blocks) == expected
    assert tuple(block.text for block in request.system or ()) == expected


@pytest.mark.parametrize("place", ["messages", "system"])
def test_a_fault_far_behind_is_named_by_its_own_number(place: str) -> None:
    index = 2 * BLOCKS_AT_ONCE + 3
    sent = [*[text("a")] * index, {"type": "text"}]
    changed = {"messages": [turn("user", *sent)]} if place == "messages" else {"system": sent}

    with pytest.raises(InvalidRequest) as refused:
        read_body(MessagesRequest, json.dumps(body(**changed)).encode(), version="2023-06-01")

    path = f"messages.0.content.{index}." if place == "messages" else f"system.{index}."
    assert str(refused.value).startswith(path)


def test_blocks_are_bounded_over_all_messages_and_system() -> None:
    half = [text("a")] * (MAX_BLOCKS // 2)
    sound = body(messages=[turn("user", *half)], system=half)
    assert isinstance(by_pieces(json.dumps(sound).encode()), MessagesRequest)

    excess = sound | {"messages": [*sound["messages"], {"role": "user", "content": "b"}]}
    assert "10000 content blocks" in str(by_pieces(json.dumps(excess).encode()))
