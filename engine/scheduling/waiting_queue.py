"""The waiting queue: preempted sequences first, then new ones, by namespace and arrival."""

from collections import deque
from collections.abc import Iterator, KeysView

from engine.scheduling.sequence import Sequence


class WaitingQueue:
    """Every sequence that is not running.

    `preempted` is in the order of first admission; the scheduler changes it directly. All others
    are newcomers: never admitted, and rejected once they have waited too long.
    """

    def __init__(self) -> None:
        """Start empty."""
        self.preempted: deque[Sequence] = deque()
        # Dictionaries as ordered sets: a sequence may leave from any place.
        self._newcomers: dict[Sequence, None] = {}
        self._by_namespace: dict[bytes, dict[Sequence, None]] = {}

    def __len__(self) -> int:
        """Return the number of waiting sequences."""
        return len(self.preempted) + len(self._newcomers)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over the preempted, then over the newcomers in order of arrival."""
        yield from self.preempted
        yield from self._newcomers

    def __contains__(self, sequence: Sequence) -> bool:
        """Return whether the sequence is waiting."""
        return sequence in self._newcomers or sequence in self.preempted

    def newcomers(self) -> KeysView[Sequence]:
        """Return all newcomers in order of arrival."""
        return self._newcomers.keys()

    def namespaces(self) -> KeysView[bytes]:
        """Return the namespaces that have newcomers."""
        return self._by_namespace.keys()

    def newcomers_of(self, namespace: bytes) -> KeysView[Sequence]:
        """Return one namespace's newcomers in order of arrival."""
        return self._by_namespace.get(namespace, {}).keys()

    def add(self, newcomer: Sequence) -> None:
        """Append a newcomer."""
        self._newcomers[newcomer] = None
        self._by_namespace.setdefault(newcomer.request.namespace, {})[newcomer] = None

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence."""
        if sequence not in self._newcomers:
            self.preempted.remove(sequence)
            return
        del self._newcomers[sequence]
        own = self._by_namespace[sequence.request.namespace]
        del own[sequence]
        if not own:
            del self._by_namespace[sequence.request.namespace]
