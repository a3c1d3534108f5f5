"""Bypass: a newcomer that does not fit is passed, and after a while admission waits for it.

    refused first ── others pass ──▶ max_bypass_ms ── no one else ──▶ starts, or others pass again
                                                      is admitted      after max_bypass_ms

So a large request is not starved by small ones, and admission is closed for at most half of the
time, however many large requests wait.
"""

from collections.abc import Callable

from engine.scheduling.sequence import Sequence


class Bypass:
    """The waiting sequences that did not fit, and the one for which admission waits."""

    def __init__(self, max_bypass_ms: int) -> None:
        """Start empty; sequences are passed for `max_bypass_ms`, then waited for as long."""
        self._max_bypass_ms = max_bypass_ms
        # Oldest first: when it was refused first, and how many blocks it could have taken last.
        self._refused: dict[Sequence, tuple[int, int]] = {}
        self._head: Sequence | None = None
        self._until_ms = 0  # the end of the wait for the head or, without a head, of the pause

    def refuse(self, sequence: Sequence, num_free: int, now_ms: int) -> None:
        """Record that a sequence did not fit into `num_free` blocks."""
        since_ms, _ = self._refused.get(sequence, (now_ms, 0))
        self._refused[sequence] = (since_ms, num_free)

    def may_fit(self, sequence: Sequence, num_free: int) -> bool:
        """Return whether more blocks are free than when the sequence did not fit."""
        return sequence not in self._refused or num_free > self._refused[sequence][1]

    def is_passed(self, sequence: Sequence) -> bool:
        """Return whether the sequence did not fit the last time that it was tried."""
        return sequence in self._refused

    def forget(self, sequence: Sequence) -> None:
        """Remove a sequence that started or ended. Idempotent."""
        self._refused.pop(sequence, None)

    def head(self, now_ms: int, is_helped: Callable[[Sequence], bool]) -> Sequence | None:
        """Return the sequence for which admission waits now; None: for none.

        `is_helped` says whether a sequence would fit once other namespaces' sequences have ended;
        one that its own namespace keeps out is not waited for.
        """
        if self._head is not None:
            if self._head in self._refused and now_ms < self._until_ms:
                return self._head
            self._head, self._until_ms = None, now_ms + self._max_bypass_ms
        if now_ms < self._until_ms:
            return None
        due_ms = now_ms - self._max_bypass_ms
        aged = [each for each, (since_ms, _) in self._refused.items() if since_ms <= due_ms]
        self._head = next(filter(is_helped, aged), None)
        if aged:
            self._until_ms = now_ms + self._max_bypass_ms
        return self._head
