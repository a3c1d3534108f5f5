"""The wall clock: the only place in the gateway that reads it."""

import time


def now_ms() -> int:
    """Milliseconds since the Unix epoch."""
    return time.time_ns() // 1_000_000
