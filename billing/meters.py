"""The five meters, and the A/B/C arithmetic that divides a prompt among them (1h before 5m)."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

TtlClass = Literal["5m", "1h"]


class Meter(StrEnum):
    """A token class with a price of its own; no token belongs to two meters."""

    INPUT = "input"
    CACHE_READ = "cache_read"
    CACHE_WRITE_5M = "cache_write_5m"
    CACHE_WRITE_1H = "cache_write_1h"
    OUTPUT = "output"


@dataclass(frozen=True, slots=True)
class Quantities:
    """Tokens by meter; the first four add up to the prompt."""

    input: int = 0
    cache_read: int = 0
    cache_write_5m: int = 0
    cache_write_1h: int = 0
    output: int = 0

    def of(self, meter: Meter) -> int:
        """Return the quantity of one meter."""
        quantity: int = getattr(self, meter.value)
        return quantity

    @property
    def prompt(self) -> int:
        """The prompt tokens: the sum of the four input meters."""
        return self.input + self.cache_read + self.cache_write_5m + self.cache_write_1h


@dataclass(frozen=True, slots=True)
class WritePoint:
    """A breakpoint that asks for a cache write: exact prefix length, TTL class, entry key."""

    num_tokens: int
    ttl_class: TtlClass
    entry_key: str


def split(
    *, total_tokens: int, read_tokens: int, writes: Sequence[WritePoint], output_tokens: int = 0
) -> Quantities:
    """Split a prompt by the A/B/C rule.

    A is `read_tokens`, B the highest 1h write above A, C the highest write above A (each A if there
    is none); `writes` are the granted breakpoints only. Read = A, 1h = B - A, 5m = C - B,
    input = total - C.

    Source: the Messages API's "mixing different TTLs" rule.
    """
    above = [w for w in writes if w.num_tokens > read_tokens]
    last_1h = max((w.num_tokens for w in above if w.ttl_class == "1h"), default=read_tokens)
    last = max((w.num_tokens for w in above), default=read_tokens)
    return Quantities(
        input=total_tokens - last,
        cache_read=read_tokens,
        cache_write_5m=last - last_1h,
        cache_write_1h=last_1h - read_tokens,
        output=output_tokens,
    )
