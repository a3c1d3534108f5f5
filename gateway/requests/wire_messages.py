"""The words around an answer: how it starts, how it ends, and both at once."""

from gateway.requests.generation import Ending
from gateway.requests.order import Order
from gateway.requests.usage import CacheOutcome, delta_usage_of, usage_of
from gateway.wire.events import MessageDelta, MessageStart, StopDelta
from gateway.wire.response import Message, TextContent


def message_start(order: Order, outcome: CacheOutcome) -> MessageStart:
    """The empty message; its usage has the whole input side and no output yet."""
    return MessageStart(
        message=Message(
            id=order.message_id,
            model=order.prompt.model.id,
            content=(),
            stop_reason=None,
            stop_sequence=None,
            usage=usage_of(outcome.quantities),
        )
    )


def message_end(ending: Ending) -> MessageDelta:
    """Why the answer ended and what it cost in all."""
    return MessageDelta(
        delta=StopDelta(stop_reason=ending.stop_reason, stop_sequence=ending.stop_sequence),
        usage=delta_usage_of(ending.quantities),
    )


def whole_message(order: Order, *, text: str, ending: Ending) -> Message:
    """The answer that is not streamed; without any text it has no block."""
    return Message(
        id=order.message_id,
        model=order.prompt.model.id,
        content=(TextContent(text=text),) if text else (),
        stop_reason=ending.stop_reason,
        stop_sequence=ending.stop_sequence,
        usage=usage_of(ending.quantities),
    )
