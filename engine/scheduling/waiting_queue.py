"""The waiting queue: preempted sequences, displaced ones, then newcomers by arrival."""

from collections import deque
from collections.abc import Iterator, KeysView

from engine.scheduling.sequence import Sequence


class WaitingQueue:
    """Every sequence that is not running.

    `preempted` ran out of blocks, in the order of first admission; the scheduler changes it
    directly. Displaced ones gave their slot to another namespace and are the next of their own.
    All others are newcomers: never admitted, and rejected once they have waited too long.
    """

    def __init__(self) -> None:
        """Start empty."""
        self.preempted: deque[Sequence] = deque()
        self._displaced: dict[bytes, deque[Sequence]] = {}
        # Dictionaries as ordered sets: a sequence may leave from any place.
        self._newcomers: dict[Sequence, None] = {}
        self._by_namespace: dict[bytes, dict[Sequence, None]] = {}

    def __len__(self) -> int:
        """Return the number of waiting sequences."""
        return len(self.preempted) + len(self.displaced()) + len(self._newcomers)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over the preempted, the displaced, and the newcomers in order of arrival."""
        yield from self.preempted
        yield from self.displaced()
        yield from self._newcomers

    def __contains__(self, sequence: Sequence) -> bool:
        """Return whether the sequence is waiting."""
        return sequence in self._newcomers or sequence in (*self.preempted, *self.displaced())

    def newcomers(self) -> KeysView[Sequence]:
        """Return all newcomers in order of arrival."""
        return self._newcomers.keys()

    def displaced(self) -> list[Sequence]:
        """Return all displaced sequences."""
        return [sequence for own in self._displaced.values() for sequence in own]

    def namespaces(self) -> list[bytes]:
        """Return the namespaces that have displaced sequences or newcomers."""
        return list(self._displaced | self._by_namespace)

    def next_displaced(self, namespace: bytes) -> Sequence | None:
        """Return a namespace's displaced sequence that was admitted first."""
        return self._displaced[namespace][0] if namespace in self._displaced else None

    def newcomers_of(self, namespace: bytes) -> KeysView[Sequence]:
        """Return one namespace's newcomers in order of arrival."""
        return self._by_namespace.get(namespace, {}).keys()

    def add(self, newcomer: Sequence) -> None:
        """Append a newcomer."""
        self._newcomers[newcomer] = None
        self._by_namespace.setdefault(newcomer.request.namespace, {})[newcomer] = None

    def add_displaced(self, sequence: Sequence) -> None:
        """Add the sequence of its namespace that was running and was admitted last."""
        self._displaced.setdefault(sequence.request.namespace, deque()).appendleft(sequence)

    def to_make_room_for(self, namespace: bytes) -> Sequence | None:
        """Return the newcomer that leaves a full queue for one of `namespace`; None: none does.

        It is the last one of the namespace that has most newcomers, if that has more than
        `namespace` would have then.
        """
        crowded = max(self._by_namespace.values(), key=len, default={})
        if len(crowded) <= len(self.newcomers_of(namespace)) + 1:
            return None
        return next(reversed(crowded))

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence."""
        if sequence in self.preempted:
            self.preempted.remove(sequence)
            return
        if sequence not in self._newcomers:
            self._remove_displaced(sequence)
            return
        del self._newcomers[sequence]
        own = self._by_namespace[sequence.request.namespace]
        del own[sequence]
        if not own:
            del self._by_namespace[sequence.request.namespace]

    def _remove_displaced(self, sequence: Sequence) -> None:
        own = self._displaced[sequence.request.namespace]
        own.remove(sequence)
        if not own:
            del self._displaced[sequence.request.namespace]
