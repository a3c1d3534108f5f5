"""Client-side latencies as `vllm bench serve` defines them: TTFT, TPOT, ITL, E2EL, goodput."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Timing:
    """When a request was sent and when each output token arrived, in seconds of one clock.

    If a server sends text instead of tokens, `arrivals_s` has one time for each piece of text and
    `output_tokens` is the server's count.
    """

    sent_s: float
    arrivals_s: list[float] = field(default_factory=list)
    output_tokens: int = 0

    @property
    def ttft_ms(self) -> float:
        """Time to the first token."""
        return (self.arrivals_s[0] - self.sent_s) * 1000

    @property
    def e2el_ms(self) -> float:
        """End-to-end latency: the time to the last token."""
        return (self.arrivals_s[-1] - self.sent_s) * 1000

    @property
    def tpot_ms(self) -> float:
        """Time per output token after the first; 0 if there is only one."""
        return (self.e2el_ms - self.ttft_ms) / max(1, self.output_tokens - 1)

    @property
    def itls_ms(self) -> list[float]:
        """Inter-token latencies: the gaps between arrivals."""
        pairs = zip(self.arrivals_s, self.arrivals_s[1:], strict=False)
        return [(later - earlier) * 1000 for earlier, later in pairs]


def percentile(values: Iterable[float], percent: float) -> float:
    """Return a percentile, linear between the two nearest values. `values` must not be empty."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return a 95 % confidence interval of the median, by order statistics."""
    ordered = sorted(values)
    reach = 0.98 * math.sqrt(len(ordered))
    low = max(0, math.floor(len(ordered) / 2 - reach))
    high = min(len(ordered) - 1, math.ceil(len(ordered) / 2 + reach))
    return ordered[low], ordered[high]


def goodput(timings: Sequence[Timing], *, seconds: float, ttft_ms: float, tpot_ms: float) -> float:
    """Return the requests a second that met both objectives."""
    met = [t for t in timings if t.ttft_ms <= ttft_ms and t.tpot_ms <= tpot_ms]
    return len(met) / seconds
