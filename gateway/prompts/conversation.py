"""A conversation as a flat sequence of content blocks, and the rules that it must obey."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from gateway.errors import InvalidRequest
from gateway.wire.request import CacheControl, PromptRequest, Role


@dataclass(frozen=True, slots=True)
class Block:
    """One content block in request order: system blocks first, then each message's.

    `path` is its dotted place in the body, `system.0` or `messages.3.content.1`. Consecutive blocks
    of one role make one turn; a block of `system` never meets a message of role `system`, so the
    role alone shows where a turn begins.
    """

    path: str
    role: Role
    text: str
    cache_control: CacheControl | None = None


def read_blocks(request: PromptRequest) -> tuple[Block, ...]:
    """The request's blocks, in order.

    Raises InvalidRequest if they do not make a conversation that can be continued.
    """
    system = [
        Block(f"system.{i}", "system", block.text, block.cache_control)
        for i, block in enumerate(request.system or ())
    ]
    messages = [
        Block(f"messages.{i}.content.{j}", message.role, block.text, block.cache_control)
        for i, message in enumerate(request.messages)
        for j, block in enumerate(message.text_blocks)
    ]
    _require_messages(request)
    _require_marked_text([*system, *messages])
    _require_text(messages)
    _require_system_after_user(request)
    _require_clean_prefill(messages[-1])
    return (*system, *messages)


def _require_messages(request: PromptRequest) -> None:
    if not request.messages:
        raise InvalidRequest("at least one message is required", path="messages")
    for i, message in enumerate(request.messages):
        if not message.content:
            raise InvalidRequest("at least one block is required", path=f"messages.{i}.content")


def _require_marked_text(blocks: Sequence[Block]) -> None:
    for block in blocks:
        if block.cache_control is not None and not block.text:
            raise InvalidRequest(
                "cache_control cannot be set for empty text blocks",
                path=f"{block.path}.cache_control",
            )


def _require_text(messages: Sequence[Block]) -> None:
    """Blocks of `system` may be empty; blocks of messages may not."""
    for block in messages:
        if not block.text:
            raise InvalidRequest("text content blocks must be non-empty", path=block.path)
        if block.text.isspace():
            raise InvalidRequest(
                "text content blocks must contain non-whitespace text", path=block.path
            )


def _require_system_after_user(request: PromptRequest) -> None:
    """A turn of role `system` follows a user turn, and is last or followed by an assistant turn."""
    turns = [
        (role, next(turn)[0])
        for role, turn in groupby(enumerate(request.messages), key=lambda item: item[1].role)
    ]
    roles = [None, *(role for role, _ in turns), None]
    for turn, (role, index) in enumerate(turns, start=1):
        if role == "system" and (
            roles[turn - 1] != "user" or roles[turn + 1] not in (None, "assistant")
        ):
            raise InvalidRequest(
                "a system message must follow a user message, and be the last one or be followed "
                "by an assistant message",
                path=f"messages.{index}.role",
            )


def _require_clean_prefill(last: Block) -> None:
    if last.role == "assistant" and last.text[-1].isspace():
        raise InvalidRequest("final assistant content cannot end with trailing whitespace")
