"""Turns: fair shares of prompt tokens for namespaces, by deficit round robin.

    turns    [ a: 900 left | b: 2048 left | c: 2048 left ]      namespaces with prompts to compute
               ^ now                          a new one joins at the end

Deficit round robin, Shreedhar and Varghese 1995. A turn is a number of prompt tokens. A namespace
that has used up its turn goes to the end of the round; what it used beyond its turn is subtracted
from the next one. So a namespace waits for at most one turn of each other one.
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
        """Return the busy namespaces in the order of their turns.

        A namespace that is not busy leaves the round, and a new one joins at the end. So turns
        cannot be saved up, and leaving and joining again gains nothing.
        """
        members = dict.fromkeys(busy)
        self._left = {name: left for name, left in self._left.items() if name in members}
        for namespace in members:
            self._left.setdefault(namespace, self._turn_tokens)
        return deque(self._left)

    def charge(self, namespace: bytes, num_tokens: int) -> bool:
        """Charge computed tokens to a namespace's turn; returns whether that ends it."""
        self._left[namespace] -= num_tokens
        if self._left[namespace] > 0:
            return False
        # The next turn is never reduced below 1: a long unchunked prompt costs one turn.
        self._left[namespace] = max(1, self._left.pop(namespace) + self._turn_tokens)
        return True
