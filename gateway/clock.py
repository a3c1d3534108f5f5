"""The wall clock; no other file of the gateway reads it."""

import time


def now_ms() -> int:
    """Milliseconds since the Unix epoch."""
    return time.time_ns() // 1_000_000
