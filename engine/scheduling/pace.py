"""Pace: how many prompt tokens a step computes, so that it takes about as long as it should.

    prompt tokens   64   368   400   368   352 ...    each measured step sets the next one's tokens
    step ms            35   184   217   209 ...

Streams get one token a step and links are read between steps, so a step's time is how long a stream
beside a long prompt waits, and how long any message waits for its reply.
"""

FIRST_TOKENS = 64  # before anything was measured
MIN_TOKENS = 16  # a chunk that is worth its step
# Without a stream only messages wait, such as the question whether the engine is alive.
ALONE_FACTOR = 5


class Pace:
    """Prompt tokens for the next step, from the time that the last ones took."""

    def __init__(self, target_ms: int | None) -> None:
        """Aim at `target_ms` a step; None: every step may use its whole budget."""
        self._target_ms = target_ms
        self._tokens_per_ms: float | None = None
        # The step that runs: when it began, its prompt tokens, whether more were waiting.
        self._running: tuple[int, int, bool] | None = None
        self._allowed_ms = 0

    def begin(self, now_ms: int) -> None:
        """Measure the step before this one, if the engine was busy all the time since it began."""
        if self._running is None:
            return
        began_ms, num_tokens, was_limited = self._running
        self._running = None
        elapsed_ms = max(1, now_ms - began_ms)
        if num_tokens and (was_limited or elapsed_ms > self._allowed_ms):
            measured = num_tokens / elapsed_ms
            known = self._tokens_per_ms
            self._tokens_per_ms = measured if known is None else min(measured, 2 * known)

    def idle(self) -> None:
        """Measure nothing until the next step."""
        self._running = None

    def prompt_tokens(self, *, is_alone: bool, budget: int) -> int:
        """Return how many prompt tokens a step may compute; `is_alone`: it serves no stream."""
        if self._target_ms is None:
            return budget
        self._allowed_ms = self._target_ms * (ALONE_FACTOR if is_alone else 1)
        if self._tokens_per_ms is None:
            return min(FIRST_TOKENS, budget)
        num_tokens = int(self._tokens_per_ms * self._allowed_ms) // MIN_TOKENS * MIN_TOKENS
        return min(max(num_tokens, MIN_TOKENS), budget)

    def end(self, began_ms: int, num_tokens: int, *, was_limited: bool) -> None:
        """Record a step that more work follows: its prompt tokens, and if others had to wait."""
        self._running = (began_ms, num_tokens, was_limited)
