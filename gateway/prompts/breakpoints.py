"""Cache markers (`cache_control`) of a conversation, and the cache breakpoints that they become.

Source: the Messages API's prompt-caching rules (where a marker may sit, automatic caching, minimum
length).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from billing.meters import TtlClass
from gateway.errors import InvalidRequest
from gateway.prompts.conversation import Block
from gateway.prompts.rendered_prompt import RenderedPrompt
from gateway.wire.request import CacheControl

MAX_MARKERS = 4  # the API's own limit, the automatic one included


@dataclass(frozen=True, slots=True)
class Marker:
    """A `cache_control` on block number `block` of the sequence; `path` leads to it in the body."""

    block: int
    ttl_class: TtlClass
    path: str


@dataclass(frozen=True, slots=True)
class CacheBreakpoint:
    """A marker that takes effect: the first `num_tokens` tokens, up to the end of block `block`."""

    block: int
    num_tokens: int
    ttl_class: TtlClass


def read_markers(
    blocks: Sequence[Block], *, automatic: CacheControl | None = None
) -> tuple[Marker, ...]:
    """The markers of a conversation in block order, the automatic one among them.

    Raises InvalidRequest if there are too many, or in an order the API refuses.
    """
    markers = [
        Marker(index, block.cache_control.ttl_class, f"{block.path}.cache_control")
        for index, block in enumerate(blocks)
        if block.cache_control is not None
    ]
    if automatic is not None:
        markers = _with_automatic(markers, blocks, automatic.ttl_class)
    if len(markers) > MAX_MARKERS:
        raise InvalidRequest(
            f"A maximum of {MAX_MARKERS} blocks with cache_control may be provided. "
            f"Found {len(markers)}."
        )
    _require_long_before_short(markers)
    return tuple(markers)


def effective_breakpoints(
    markers: Sequence[Marker], rendered: RenderedPrompt, *, min_tokens: int
) -> tuple[CacheBreakpoint, ...]:
    """Return the markers whose prefix is long enough, strictly ascending; the rest are inert."""
    by_length = {
        rendered.block_ends[marker.block]: CacheBreakpoint(
            marker.block, rendered.block_ends[marker.block], marker.ttl_class
        )
        for marker in markers
    }
    return tuple(point for num_tokens, point in by_length.items() if num_tokens >= min_tokens)


def _with_automatic(
    markers: list[Marker], blocks: Sequence[Block], ttl_class: TtlClass
) -> list[Marker]:
    """Mark the last block that can be marked; nothing to do if it already is, the same way."""
    last = max((i for i, block in enumerate(blocks) if block.text), default=None)
    if last is None:
        return markers
    if not markers or markers[-1].block < last:
        return [*markers, Marker(last, ttl_class, "cache_control")]
    if markers[-1].ttl_class != ttl_class:
        raise InvalidRequest(
            f"automatic caching with ttl='{ttl_class}' falls on a block that is already marked "
            f"with ttl='{markers[-1].ttl_class}'",
            path="cache_control.ttl",
        )
    return markers


def _require_long_before_short(markers: Sequence[Marker]) -> None:
    short_seen = False
    for marker in markers:
        if short_seen and marker.ttl_class == "1h":
            raise InvalidRequest(
                "a ttl='1h' cache_control block must not come after a ttl='5m' cache_control "
                "block. Blocks are read in this order: `tools`, `system`, `messages`.",
                path=f"{marker.path}.ttl",
            )
        short_seen = short_seen or marker.ttl_class == "5m"
