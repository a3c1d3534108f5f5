"""The host tier: leases in page-locked host memory, beside a KV pool on a GPU.

It takes every lease that is worth it, at once, and forgets all when the engine ends. On a CPU the
KV pool already is host memory, so there is no host tier.
"""

from engine.lease import StoredPrefix
from engine.tiers.tier import Payload, Recovered


class HostTier:
    """See `engine.tiers.tier.Tier`."""

    name = "host"
    keeps_all = True

    def __init__(self, *, budget_bytes: int) -> None:
        """Start empty."""
        self._budget_bytes = budget_bytes
        self._payloads: dict[bytes, tuple[Payload, int]] = {}
        self._used_bytes = 0
        self._saved: list[bytes] = []

    def recover(self) -> list[Recovered]:
        """Nothing survives the engine here."""
        return []

    @property
    def free_bytes(self) -> int:
        """What is left of the budget."""
        return self._budget_bytes - self._used_bytes

    def accepts(self, num_bytes: int) -> bool:
        """Memory always keeps up."""
        return True

    def save(
        self, stored: StoredPrefix, payload: Payload, *, num_bytes: int, deadline_ms: int
    ) -> None:
        """Keep the payload."""
        self._payloads[stored.key] = payload, num_bytes
        self._used_bytes += num_bytes
        self._saved.append(stored.key)

    def poll(self) -> list[tuple[bytes, bool]]:
        """Everything is whole at once."""
        saved, self._saved = self._saved, []
        return [(key, True) for key in saved if key in self._payloads]

    def load(self, key: bytes) -> Payload | None:
        """The payload; memory does not lose any."""
        return self._payloads[key][0]

    def extend(self, key: bytes, deadline_ms: int) -> None:
        """Nothing here knows deadlines."""

    def drop(self, key: bytes) -> None:
        """Forget the payload."""
        _, num_bytes = self._payloads.pop(key, (None, 0))
        self._used_bytes -= num_bytes

    def stats(self) -> dict[str, float]:
        """Gauges by metric name."""
        return {"lease_host_bytes": self._used_bytes, "leases_on_host": len(self._payloads)}
