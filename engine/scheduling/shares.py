"""Shares: how many running slots a namespace keeps when others want them.

    slots   [ a a a a a a a a ]   b waits: a's youngest makes room     [ a a a a b b b b ]

A share is an equal part of what there is. Unused parts are borrowed, and given back one by one
when another namespace that has less than its share wants them.
"""

from collections import Counter
from collections.abc import Collection
from collections.abc import Sequence as Items

from engine.scheduling.sequence import Sequence


class Shares:
    """The running slots of each namespace, as they are now."""

    def __init__(
        self, running: Items[Sequence], waiting: Collection[bytes], *, num_slots: int
    ) -> None:
        """Count the running sequences; `waiting` has the namespaces that want more slots."""
        self._running = running
        self._num_free = num_slots - len(running)
        self._num_taken = Counter(sequence.request.namespace for sequence in running)
        self._waiting = waiting
        num_namespaces = len(self._num_taken.keys() | set(waiting))
        self._share = max(1, num_slots // max(1, num_namespaces))

    def is_below(self, namespace: bytes) -> bool:
        """Return whether a namespace has less than its share."""
        return self._num_taken[namespace] < self._share

    def claimants(self) -> list[bytes]:
        """Return the waiting namespaces below their share, the one with fewest slots first."""
        below = [namespace for namespace in self._waiting if self.is_below(namespace)]
        return sorted(below, key=self._num_taken.__getitem__)

    def may_start(self, namespace: bytes) -> bool:
        """Return whether a namespace may take a free slot: its own, or one that no other claims."""
        return self.is_below(namespace) or self._num_free > len(self.claimants())

    def borrower(self) -> Sequence | None:
        """Return the youngest sequence of the namespace that has most beyond its share."""
        if not self._num_taken:
            return None
        namespace, num_taken = self._num_taken.most_common(1)[0]
        if num_taken <= self._share:
            return None
        return next(s for s in reversed(self._running) if s.request.namespace == namespace)
