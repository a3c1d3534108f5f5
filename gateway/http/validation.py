"""From a JSON body to a wire model, piece by piece, so that no call holds the interpreter long.

A conversation of thousands of blocks takes pydantic most of a second. Called once for the whole
body, it would stop every other thread of the process for so long, the event loop's among them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json, to_json

from gateway.errors import InvalidRequest
from gateway.http.json_shape import measure, pieces_of
from gateway.wire.request import (
    MAX_BLOCKS,
    UNKNOWN_FIELD,
    ApiVersion,
    Content,
    ContentBlock,
    InputMessage,
    PromptRequest,
    TextBlock,
    TextBlocks,
)

Body = TypeVar("Body", bound=PromptRequest)
Value = TypeVar("Value")
Context = Mapping[str, Any]
Location = tuple[int | str, ...]

BLOCKS_AT_ONCE = 256  # about 3 ms

_MESSAGE = TypeAdapter(InputMessage)
_CONTENT = TypeAdapter[tuple[ContentBlock, ...]](Content)
_SYSTEM = TypeAdapter[tuple[TextBlock, ...]](TextBlocks)


def read_body(model: type[Body], body: bytes | bytearray, *, version: ApiVersion) -> Body:
    """Validate a JSON body as this model under this API version; a long one takes half a second.

    Raises InvalidRequest that names the first fault as `<path>: <what is wrong>`.

    The models bound the number of faults: a list stops at its first one, an object reports one
    unknown field. Otherwise a body with a fault every few bytes would fill the memory.
    """
    context = {"version": version}
    measure(pieces_of(body))
    try:
        document = from_json(body)
    except ValueError as error:
        raise InvalidRequest(f"Invalid JSON: {error}") from None
    conversation = _take_conversation(document) if isinstance(document, dict) else {}
    rest, fault = _validate_rest(model, document, context)
    if fault is not None and _stands_first(fault):
        raise fault
    validated = _validate_conversation(conversation, context)
    if rest is None:
        assert fault is not None, "there is a rest or its fault"
        raise fault
    return rest.model_copy(update=validated)


def _stands_first(fault: InvalidRequest) -> bool:
    """Whether this fault of the other fields stands before the conversation's."""
    return str(fault).startswith(("model", "messages"))


def _take_conversation(document: dict[str, Any]) -> dict[str, Any]:
    """Take out what may be long, and leave what stands for it; other types stay as faults."""
    conversation = {}
    if isinstance(document.get("messages"), list):
        conversation["messages"] = document["messages"]
        document["messages"] = []
    if isinstance(document.get("system"), list | str):
        conversation["system"] = document.pop("system")
    return conversation


def _validate_rest(
    model: type[Body], rest: Any, context: Context
) -> tuple[Body | None, InvalidRequest | None]:
    """Return the other fields validated, or their first fault.

    As JSON again: strictness is another one for Python's types.
    """
    sent = to_json(rest, inf_nan_mode="constants")
    try:
        return model.model_validate_json(sent, strict=True, context=dict(context)), None
    except ValidationError as error:
        return None, _first_fault(error)


def _validate_conversation(conversation: dict[str, Any], context: Context) -> dict[str, Any]:
    """The same fields, validated; the counts come first, since they cost nothing."""
    messages, system = conversation.get("messages", []), conversation.get("system", [])
    if isinstance(system, str):
        system = [{"type": "text", "text": system}]
    if len(system) + sum(map(_num_blocks, messages)) > MAX_BLOCKS:
        raise InvalidRequest(f"more than {MAX_BLOCKS} content blocks in `system` and `messages`")
    validated: dict[str, Any] = {}
    if "messages" in conversation:
        validated["messages"] = tuple(
            _message(message, context, at=("messages", index))
            for index, message in enumerate(messages)
        )
    if "system" in conversation:
        validated["system"] = _in_slices(_SYSTEM, system, context, at=("system",))
    return validated


def _num_blocks(message: object) -> int:
    content = message.get("content") if isinstance(message, dict) else None
    return max(1, len(content)) if isinstance(content, list) else 1


def _message(sent: Any, context: Context, *, at: Location) -> InputMessage:
    content = sent.get("content") if isinstance(sent, dict) else None
    if not isinstance(content, list) or len(content) <= BLOCKS_AT_ONCE:
        return _validate(_MESSAGE, sent, context, at=at)
    start = sent | {"content": content[:BLOCKS_AT_ONCE]}
    message = _validate(_MESSAGE, start, context, at=at)
    others = _in_slices(_CONTENT, content, context, at=(*at, "content"), first=BLOCKS_AT_ONCE)
    return message.model_copy(update={"content": (*message.content, *others)})


def _in_slices(
    adapter: TypeAdapter[tuple[Value, ...]],
    items: Sequence[object],
    context: Context,
    *,
    at: Location,
    first: int = 0,
) -> tuple[Value, ...]:
    """Validate the items from number `first` on; `at` is where item 0 is in the body."""
    validated: list[Value] = []
    for start in range(first, len(items), BLOCKS_AT_ONCE):
        some = list(items[start : start + BLOCKS_AT_ONCE])
        blocks: tuple[Value, ...] = _validate(adapter, some, context, at=at, offset=start)
        validated += blocks
    return tuple(validated)


def _validate(
    adapter: TypeAdapter[Value], value: object, context: Context, *, at: Location, offset: int = 0
) -> Value:
    try:
        return adapter.validate_python(value, strict=True, context=dict(context))
    except ValidationError:
        pass
    try:  # again as JSON, for the fault in JSON's words
        return adapter.validate_json(
            to_json(value, inf_nan_mode="constants"), strict=True, context=dict(context)
        )
    except ValidationError as error:
        raise _first_fault(error, at=at, offset=offset) from None


def _first_fault(error: ValidationError, *, at: Location = (), offset: int = 0) -> InvalidRequest:
    fault = error.errors(include_url=False, include_input=False)[0]
    loc: Location = fault["loc"]
    if offset and loc and isinstance(loc[0], int):
        loc = (loc[0] + offset, *loc[1:])
    unknown = fault.get("ctx", {}).get(UNKNOWN_FIELD)
    found = (*at, *loc) if unknown is None else (*at, *loc, unknown)
    return InvalidRequest(fault["msg"], path=_dotted(found) or None)


def _dotted(location: Location) -> str:
    return ".".join(map(str, location))
