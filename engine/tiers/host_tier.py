"""The host tier: copies of leases in pinned host memory, for a KV pool on a GPU.

It stores every lease for which a copy pays, synchronously, and loses all when the engine stops. On
a CPU the KV pool is host memory already, so there is no host tier.
"""

from engine.lease_types import StoredPrefix
from engine.tiers.tier import Payload, Recovered


class HostTier:
    """A Tier in memory."""

    name = "host"
    keeps_all = True

    def __init__(self, *, budget_bytes: int) -> None:
        """Start empty."""
        self._budget_bytes = budget_bytes
        self._payloads: dict[bytes, tuple[Payload, int]] = {}
        self._used_bytes = 0
        self._saved: list[bytes] = []

    def recover(self) -> list[Recovered]:
        """Return nothing: no copy survives a restart."""
        return []

    @property
    def free_bytes(self) -> int:
        """The unused part of the budget."""
        return self._budget_bytes - self._used_bytes

    def accepts(self, num_bytes: int) -> bool:
        """Always True: memory has no write queue."""
        return True

    def save(
        self, stored: StoredPrefix, payload: Payload, *, num_bytes: int, deadline_ms: int
    ) -> None:
        """Store the payload."""
        self._payloads[stored.key] = payload, num_bytes
        self._used_bytes += num_bytes
        self._saved.append(stored.key)

    def poll(self) -> list[tuple[bytes, bool]]:
        """Return all saves since the last call; each has succeeded."""
        saved, self._saved = self._saved, []
        return [(key, True) for key in saved if key in self._payloads]

    def load(self, key: bytes) -> Payload | None:
        """Return the payload."""
        return self._payloads[key][0]

    def extend(self, key: bytes, deadline_ms: int) -> None:
        """Do nothing: no deadline is stored here."""

    def drop(self, key: bytes) -> None:
        """Remove the payload."""
        _, num_bytes = self._payloads.pop(key, (None, 0))
        self._used_bytes -= num_bytes

    def sync(self) -> None:
        """Nothing to do: memory does not outlive a power cut."""

    def stats(self) -> dict[str, float]:
        """Return gauges by metric name."""
        return {"lease_host_bytes": self._used_bytes, "leases_on_host": len(self._payloads)}
