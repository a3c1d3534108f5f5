"""The interface of a tier, and when reading a copy back is faster than recomputing its prefix.

    device   the KV pool itself, where leases are pinned; not a Tier
    host     pinned host memory; only if the pool is on a GPU
    disk     one file a lease, for leases that persist

A tier stores complete leases as opaque payloads. `engine.tiers.lease_store` chooses the tiers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.lease_types import StoredPrefix

Payload = Any  # what Snapshot returns and BlockLoad writes back to the pool


@dataclass(frozen=True, slots=True)
class Recovered:
    """A lease that a tier still holds after a restart."""

    stored: StoredPrefix
    deadline_ms: int
    num_bytes: int


class Snapshot(Protocol):
    """Copies blocks out of the KV pool: the model runner's `snapshot`."""

    def __call__(self, blocks: Sequence[int], num_tokens: int) -> Payload:
        """Return the first `num_tokens` slots of `blocks`; later slots are zero."""
        ...


class Tier(Protocol):
    """A store of complete leases, called by the engine's thread only; no call waits for a write."""

    @property
    def name(self) -> str:
        """The tier's name in records and reports."""
        ...

    @property
    def keeps_all(self) -> bool:
        """Whether it stores every lease, or only those that persist."""
        ...

    def recover(self) -> list[Recovered]:
        """Return the leases that an earlier engine left. Called once, first."""
        ...

    @property
    def free_bytes(self) -> int:
        """The unused part of its budget."""
        ...

    def accepts(self, num_bytes: int) -> bool:
        """Whether a write of this size can be queued now, budget aside."""
        ...

    def save(
        self, stored: StoredPrefix, payload: Payload, *, num_bytes: int, deadline_ms: int
    ) -> None:
        """Start to store a lease that is not stored yet; `poll` reports the end."""
        ...

    def poll(self) -> list[tuple[bytes, bool]]:
        """Return (key, success) of saves that ended since the last call; no dropped leases."""
        ...

    def load(self, key: bytes) -> Payload | None:
        """Return a saved lease's payload, or None if it is damaged and has to be dropped."""
        ...

    def extend(self, key: bytes, deadline_ms: int) -> None:
        """Move the lease's deadline."""
        ...

    def drop(self, key: bytes) -> None:
        """Remove the lease, also while it is being saved. Idempotent."""
        ...

    def stats(self) -> dict[str, float]:
        """Return gauges and counters by metric name."""
        ...


@dataclass(frozen=True, slots=True)
class Costs:
    """The rates that decide between recomputing a prefix and reading it back, measured at start.

    prefill_tokens   tokens computed per second
    tier_bytes       bytes read per second, by tier; an absent tier is never read
    """

    prefill_tokens: float
    tier_bytes: dict[str, float]

    def pays(self, tier: str, *, num_bytes: int, num_tokens: int) -> bool:
        """Whether reading `num_bytes` back takes less time than computing `num_tokens`."""
        return num_bytes * self.prefill_tokens < num_tokens * self.tier_bytes.get(tier, 0.0)
