"""The live leases, indexed by prefix, by id and by deadline."""

import heapq
from collections.abc import Iterator

from engine.lease_types import Lease

_SPARE_DEADLINES = 64


class LeaseTable:
    """Every live lease of one engine."""

    def __init__(self) -> None:
        """Start empty."""
        self._by_key: dict[bytes, Lease] = {}
        self._by_id: dict[str, Lease] = {}
        # One item for each lease. Its deadline may be earlier than the lease's own, never later.
        self._deadlines: list[tuple[int, int, Lease]] = []

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._by_key.values())

    def add(self, lease: Lease) -> None:
        """Add a lease whose prefix has none."""
        assert lease.key not in self._by_key, f"leased twice: {lease.id}"
        self._by_key[lease.key] = self._by_id[lease.id] = lease
        heapq.heappush(self._deadlines, (lease.deadline_ms, lease.number, lease))

    def remove(self, lease: Lease) -> None:
        """Remove a lease."""
        del self._by_key[lease.key], self._by_id[lease.id]
        # A lease that ends early leaves its item in the heap until its deadline, perhaps an hour.
        if len(self._deadlines) > 2 * len(self) + _SPARE_DEADLINES:
            self._deadlines = [item for item in self._deadlines if self._is_live(item[2])]
            heapq.heapify(self._deadlines)

    def of_prefix(self, key: bytes) -> Lease | None:
        """Return the lease of exactly this prefix."""
        return self._by_key.get(key)

    def of_id(self, lease_id: str) -> Lease | None:
        """Return the lease with this id."""
        return self._by_id.get(lease_id)

    def next_due(self) -> Lease | None:
        """Return the lease with the earliest deadline."""
        while self._deadlines:
            deadline_ms, number, lease = self._deadlines[0]
            if not self._is_live(lease):
                heapq.heappop(self._deadlines)
            elif deadline_ms == lease.deadline_ms:
                return lease
            else:
                heapq.heapreplace(self._deadlines, (lease.deadline_ms, number, lease))
        return None

    def check_integrity(self) -> None:
        """Assert that the maps agree and that every lease is whole somewhere."""
        assert set(self._by_key.values()) == set(self._by_id.values()), "lease maps disagree"
        assert all(lease.blocks or lease.copies for lease in self), "a lease is nowhere"
        due = {lease for _, _, lease in self._deadlines}
        assert due >= set(self), "a lease without a deadline"

    def _is_live(self, lease: Lease) -> bool:
        return self._by_id.get(lease.id) is lease
