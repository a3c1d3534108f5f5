"""How many connections are open, a client address and in all, and which one has to go."""

import resource
from collections import Counter
from typing import Protocol

OTHER_FILES = 256  # descriptors for the database, the engine link, logs and models
MAX_CONNECTIONS = 10_000  # each idle one costs about 20 kB
MIN_CONNECTIONS = 16  # with fewer descriptors than this nothing works anyway


class Connection(Protocol):
    """An open connection, as it is counted."""

    network: str

    def abort(self) -> None:
        """Close now and drop what is unsent."""
        ...


class ConnectionCounts:
    """Open connections by client network, and those of them that serve no request now.

    At the bound in all the connection that has been idle longest makes room for a new one, so that
    connections which only wait cannot keep `/healthz` from being reached.
    """

    def __init__(self, *, max_total: int, max_per_address: int) -> None:
        self._max_total = max_total
        self._max_per_address = max_per_address
        self._by_network: Counter[str] = Counter()
        self._idle: dict[Connection, None] = {}  # in the order in which they became idle
        self.total = 0

    def admit(self, connection: Connection) -> bool:
        """Count a new connection, which is idle; False if it must be closed instead."""
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


def connections_possible() -> int:
    """Return how many connections this process may have; raises its limit of open files first."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + OTHER_FILES
    files = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    return max(MIN_CONNECTIONS, files - OTHER_FILES)
