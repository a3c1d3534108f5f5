"""The server-sent events of a streamed message, and their encoding."""

from typing import Literal

import orjson

from gateway.wire.response import ErrorBody, Message, ResponseModel, StopReason, TextContent


class MessageStart(ResponseModel):
    """The empty message, with the input side of its usage."""

    type: Literal["message_start"] = "message_start"
    message: Message


class ContentBlockStart(ResponseModel):
    """An empty block begins."""

    type: Literal["content_block_start"] = "content_block_start"
    index: int
    content_block: TextContent = TextContent(text="")


class TextDelta(ResponseModel):
    """More text of a block."""

    type: Literal["text_delta"] = "text_delta"
    text: str


class ContentBlockDelta(ResponseModel):
    """More of a block."""

    type: Literal["content_block_delta"] = "content_block_delta"
    index: int
    delta: TextDelta


class ContentBlockStop(ResponseModel):
    """A block is whole."""

    type: Literal["content_block_stop"] = "content_block_stop"
    index: int


class DeltaUsage(ResponseModel):
    """Cumulative usage: it overwrites what message_start said, so all of it is repeated."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class StopDelta(ResponseModel):
    """Why the output ended."""

    stop_reason: StopReason
    stop_sequence: str | None
    stop_details: None = None


class MessageDelta(ResponseModel):
    """The end of the output and the final usage."""

    type: Literal["message_delta"] = "message_delta"
    delta: StopDelta
    usage: DeltaUsage


class MessageStop(ResponseModel):
    """The last event of a successful stream."""

    type: Literal["message_stop"] = "message_stop"


class Ping(ResponseModel):
    """A sign of life while nothing else is to be said."""

    type: Literal["ping"] = "ping"


Event = (
    MessageStart
    | ContentBlockStart
    | ContentBlockDelta
    | ContentBlockStop
    | MessageDelta
    | MessageStop
    | Ping
    | ErrorBody  # the last event of a stream that failed after its headers had left
)


def encode_text_delta(index: int, text: str) -> bytes:
    """Return what `encode` returns for a ContentBlockDelta of text; one is written for each token.

    It builds no pydantic object, which takes longer than the rest of a token's way.
    """
    return _TEXT_DELTA % (index, orjson.dumps(text))


_TEXT_DELTA = (
    b"event: content_block_delta\n"
    b'data: {"type":"content_block_delta","index":%d,"delta":{"type":"text_delta","text":%b}}\n\n'
)


def encode(event: Event) -> bytes:
    """Write one event as an SSE record; its name is the data's own `type`."""
    return f"event: {event.type}\ndata: {event.model_dump_json()}\n\n".encode()
