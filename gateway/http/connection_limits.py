"""How many connections may be open, in all and from one address, and which one has to go."""

import resource
from collections import Counter
from typing import Protocol

SPARE_DESCRIPTORS = 128  # files, the engine's link, the database


class Connection(Protocol):
    """An open connection, as it is counted."""

    network: str

    def abort(self) -> None:
        """Close now and drop what is unsent."""
        ...


class ConnectionLimits:
    """Open connections by client network, and those of them that serve no request now.

    At the bound in all the connection that has been idle longest makes room for a new one, so that
    connections which only wait cannot keep `/healthz` from being reached.
    """

    def __init__(self, *, max_total: int, max_per_address: int) -> None:
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._max_total = min(max_total, max(1, descriptors - SPARE_DESCRIPTORS))
        self._max_per_address = max_per_address
        self._by_network: Counter[str] = Counter()
        self._idle: dict[Connection, None] = {}  # in the order in which they became idle
        self.total = 0

    def admit(self, connection: Connection) -> bool:
        """Count a new connection, which is idle; False, and not counted, if there are too many."""
        if self._by_network[connection.network] >= self._max_per_address:
            return False
        if self.total >= self._max_total:
            if not self._idle:
                return False
            oldest = next(iter(self._idle))
            self.remove(oldest)
            oldest.abort()
        self.total += 1
        self._by_network[connection.network] += 1
        self._idle[connection] = None
        return True

    def set_busy(self, connection: Connection) -> None:
        """The connection serves a request; it is not closed for another one."""
        self._idle.pop(connection, None)

    def set_idle(self, connection: Connection) -> None:
        """The connection waits for its client."""
        self._idle[connection] = None

    def remove(self, connection: Connection) -> None:
        """Count an admitted connection no more. It must be called once for each."""
        self._idle.pop(connection, None)
        self.total -= 1
        self._by_network[connection.network] -= 1
        if self._by_network[connection.network] == 0:
            del self._by_network[connection.network]
