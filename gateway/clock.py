"""The gateway's time: the wall clock, which here never runs backwards."""

import threading
import time
from collections.abc import Callable


class Clock:
    """Milliseconds since the Unix epoch; a wall clock that steps back does not take it along.

    After such a step it goes on from the last time seen, at the pace of the monotonic clock, until
    the wall clock has caught up. So no request ends before it began, and entries still expire.

    wall_ms       milliseconds since the Unix epoch; it may step
    monotonic_ms  milliseconds since any moment; it never steps
    """

    def __init__(self, *, wall_ms: Callable[[], int], monotonic_ms: Callable[[], int]) -> None:
        self._wall_ms = wall_ms
        self._monotonic_ms = monotonic_ms
        self._lock = threading.Lock()
        self._seen_ms = wall_ms()
        self._seen_at_ms = monotonic_ms()

    def __call__(self) -> int:
        """Return the time: never less than before."""
        return self._move(self._wall_ms())

    def advance_to(self, not_before_ms: int) -> None:
        """Go on from this time, if it is later than now: another process has seen it already."""
        self._move(not_before_ms)

    def _move(self, to_ms: int) -> int:
        with self._lock:
            at_ms = self._monotonic_ms()
            self._seen_ms = max(to_ms, self._seen_ms + at_ms - self._seen_at_ms)
            self._seen_at_ms = at_ms
            return self._seen_ms


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000


def _monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000


now_ms = Clock(wall_ms=_wall_ms, monotonic_ms=_monotonic_ms)
