"""The queue: the preempted first, then newcomers, those of one namespace in order of arrival."""

from collections import deque
from collections.abc import Iterator, KeysView

from engine.scheduling.sequence import Sequence


class WaitingQueue:
    """Every sequence that is not running.

    `preempted` are in the order of their first admission; only the scheduler changes it. All
    others are newcomers: never admitted, and refused once they have waited too long.
    """

    def __init__(self) -> None:
        """Start empty."""
        self.preempted: deque[Sequence] = deque()
        # Dictionaries serve as ordered sets, since whoever leaves may stand anywhere.
        self._newcomers: dict[Sequence, None] = {}
        self._by_namespace: dict[bytes, dict[Sequence, None]] = {}

    def __len__(self) -> int:
        """How many wait."""
        return len(self.preempted) + len(self._newcomers)

    def __iter__(self) -> Iterator[Sequence]:
        """Everyone who waits: the preempted, then the newcomers in order of arrival."""
        yield from self.preempted
        yield from self._newcomers

    def __contains__(self, sequence: Sequence) -> bool:
        """Whether the sequence waits."""
        return sequence in self._newcomers or sequence in self.preempted

    def newcomers(self) -> KeysView[Sequence]:
        """All newcomers in order of arrival."""
        return self._newcomers.keys()

    def namespaces(self) -> KeysView[bytes]:
        """Who has newcomers."""
        return self._by_namespace.keys()

    def newcomers_of(self, namespace: bytes) -> KeysView[Sequence]:
        """One namespace's newcomers in order of arrival."""
        return self._by_namespace.get(namespace, {}).keys()

    def add(self, newcomer: Sequence) -> None:
        """Let a newcomer stand at the end."""
        self._newcomers[newcomer] = None
        self._by_namespace.setdefault(newcomer.request.namespace, {})[newcomer] = None

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it stands."""
        if sequence not in self._newcomers:
            self.preempted.remove(sequence)
            return
        del self._newcomers[sequence]
        own = self._by_namespace[sequence.request.namespace]
        del own[sequence]
        if not own:
            del self._by_namespace[sequence.request.namespace]
