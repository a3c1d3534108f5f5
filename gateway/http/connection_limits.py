"""How many connections may be open: in all, and from one address."""

import resource
from collections import Counter

SPARE_DESCRIPTORS = 128  # files, the engine's link, the database


class ConnectionLimits:
    """Counts the open connections of this process."""

    def __init__(self, *, max_total: int, max_per_address: int) -> None:
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._max_total = min(max_total, max(1, descriptors - SPARE_DESCRIPTORS))
        self._max_per_address = max_per_address
        self._total = 0
        self._by_address: Counter[str] = Counter()

    def add(self, address: str) -> bool:
        """Count a connection; False, and not counted, if there are too many."""
        if self._total >= self._max_total or self._by_address[address] >= self._max_per_address:
            return False
        self._total += 1
        self._by_address[address] += 1
        return True

    def remove(self, address: str) -> None:
        """Forget a connection that was counted."""
        self._total -= 1
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]
