"""Turns: whose prompts are computed next, so that no namespace starves another.

    turns    [ a: 900 left | b: 2048 left | c: 2048 left ]      who has something to compute
               ^ now                            ^ newcomers join here

Deficit round robin, Shreedhar and Varghese 1995. A turn is a number of prompt tokens. Whoever has
used its own up goes to the end of the round, and what it took too much is missing from its next.
So a namespace waits for at most one turn of each other one, however much they have queued.
"""

from collections import deque
from collections.abc import Iterable


class Turns:
    """The round of the namespaces that have prompts to compute."""

    def __init__(self, turn_tokens: int) -> None:
        """Start with an empty round of turns of `turn_tokens` prompt tokens."""
        self._turn_tokens = turn_tokens
        self._left: dict[bytes, int] = {}

    def order(self, busy: Iterable[bytes]) -> deque[bytes]:
        """Put the busy namespaces in the order of their turns.

        Those who are not busy leave the round; those who are new to it join at its end. So nobody
        saves up turns, and nobody gains by coming back.
        """
        members = dict.fromkeys(busy)
        self._left = {name: left for name, left in self._left.items() if name in members}
        for namespace in members:
            self._left.setdefault(namespace, self._turn_tokens)
        return deque(self._left)

    def charge(self, namespace: bytes, num_tokens: int) -> bool:
        """Count computed tokens against a namespace's turn; whether that ends it."""
        self._left[namespace] -= num_tokens
        if self._left[namespace] > 0:
            return False
        # More than a whole turn is never owed: a long unchunked prompt is one turn.
        self._left[namespace] = max(1, self._left.pop(namespace) + self._turn_tokens)
        return True
