import pytest

from gateway.errors import InvalidRequest
from gateway.prompts.conversation import read_blocks
from tests.gateway.bodies import EPHEMERAL, read, text, turn


def test_blocks_stand_in_request_order_under_their_paths() -> None:
    request = read(
        system=[text("s0"), text("s1")],
        messages=[turn("user", text("u0"), text("u1")), turn("assistant", text("a0"))],
    )

    blocks = read_blocks(request)

    assert [(block.path, block.role, block.text) for block in blocks] == [
        ("system.0", "system", "s0"),
        ("system.1", "system", "s1"),
        ("messages.0.content.0", "user", "u0"),
        ("messages.0.content.1", "user", "u1"),
        ("messages.1.content.0", "assistant", "a0"),
    ]


def test_empty_text_is_accepted_in_system_only() -> None:
    assert len(read_blocks(read(system=[text("")]))) == 2

    with pytest.raises(InvalidRequest, match="text content blocks must be non-empty"):
        read_blocks(read(messages=[turn("user", text("x"), text(""))]))
    with pytest.raises(InvalidRequest, match="must contain non-whitespace text"):
        read_blocks(read(messages=[turn("user", text(" \n"))]))


@pytest.mark.parametrize("place", ["system", "messages"])
def test_a_marker_on_empty_text_is_refused_anywhere(place: str) -> None:
    marked = text("", cache_control=EPHEMERAL)
    fields = {"system": [marked]} if place == "system" else {"messages": [turn("user", marked)]}

    with pytest.raises(InvalidRequest, match="cache_control cannot be set for empty text blocks"):
        read_blocks(read(**fields))


def test_no_message_and_no_block_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="at least one message is required"):
        read_blocks(read(messages=[]))
    with pytest.raises(InvalidRequest, match=r"messages\.1\.content: at least one block"):
        read_blocks(read(messages=[turn("user", text("x")), turn("user")]))


@pytest.mark.parametrize(
    ("roles", "accepted"),
    [
        (["user", "system"], True),
        (["user", "system", "assistant", "user"], True),
        (["user", "user", "system", "system", "assistant"], True),
        (["system", "user"], False),
        (["user", "assistant", "system"], False),
        (["user", "system", "user"], False),
    ],
)
def test_a_system_message_follows_a_user_turn(roles: list[str], accepted: bool) -> None:
    request = read(messages=[turn(role, text("x")) for role in roles])

    if accepted:
        assert len(read_blocks(request)) == len(roles)
    else:
        with pytest.raises(InvalidRequest, match=r"messages\.\d\.role: a system message must"):
            read_blocks(request)


def test_a_prefill_must_not_end_in_whitespace() -> None:
    prefill = [turn("user", text("x")), turn("assistant", text("The answer is "))]

    with pytest.raises(
        InvalidRequest, match="final assistant content cannot end with trailing whitespace"
    ):
        read_blocks(read(messages=prefill))
    assert read_blocks(read(messages=[*prefill, turn("user", text("y"))]))
