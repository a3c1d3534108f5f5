"""A request's output on the wire: the events of a stream, or one whole Message."""

from collections.abc import Sequence

from billing.cache_split import CacheSplit
from gateway.requests.generation import Ending
from gateway.requests.order import Order
from gateway.requests.output import BlockDelta, BlockEvent, BlockStart, BlockStop
from gateway.requests.usage import delta_usage_of, usage_of
from gateway.wire.events import (
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    MessageDelta,
    MessageStart,
    StopDelta,
    TextDelta,
)
from gateway.wire.response import Message, TextContent


def message_start(order: Order, cache: CacheSplit) -> MessageStart:
    """Return the empty message; its usage has the whole input side and no output yet."""
    return MessageStart(
        message=Message(
            id=order.message_id,
            model=order.prompt.model.id,
            content=(),
            stop_reason=None,
            stop_sequence=None,
            usage=usage_of(cache.quantities),
        )
    )


def block_event(event: BlockEvent) -> ContentBlockStart | ContentBlockDelta | ContentBlockStop:
    """Return the wire form of one block event."""
    match event:
        case BlockStart(index=index):
            return ContentBlockStart(index=index)
        case BlockDelta(index=index, text=text):
            return ContentBlockDelta(index=index, delta=TextDelta(text=text))
        case BlockStop(index=index):
            return ContentBlockStop(index=index)


def message_delta(ending: Ending) -> MessageDelta:
    """Return why the output ended and the usage of the whole request."""
    return MessageDelta(
        delta=StopDelta(stop_reason=ending.stop_reason, stop_sequence=ending.stop_sequence),
        usage=delta_usage_of(ending.quantities),
    )


def whole_message(order: Order, *, events: Sequence[BlockEvent], ending: Ending) -> Message:
    """Return the message that is not streamed, from all of its block events."""
    texts: dict[int, list[str]] = {}
    for event in events:
        if isinstance(event, BlockDelta):
            texts.setdefault(event.index, []).append(event.text)
    return Message(
        id=order.message_id,
        model=order.prompt.model.id,
        content=tuple(TextContent(text="".join(pieces)) for pieces in texts.values()),
        stop_reason=ending.stop_reason,
        stop_sequence=ending.stop_sequence,
        usage=usage_of(ending.quantities),
    )
