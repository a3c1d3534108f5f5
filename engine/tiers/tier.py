"""Tiers: where leases are kept outside the KV pool, and when that pays.

    device   the KV pool itself; a lease is pinned there while it can be
    host     pinned host memory; only where the pool is on a GPU
    disk     one file a lease, for leases that persist; see `engine.tiers.disk_tier`

A tier keeps whole leases as opaque payloads. `engine.tiers.lease_store` decides what goes where.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.lease import StoredPrefix

Payload = Any  # what the snapshot function makes of blocks, and what `BlockLoad` carries back


@dataclass(frozen=True, slots=True)
class Recovered:
    """A lease that a tier kept through a restart."""

    stored: StoredPrefix
    deadline_ms: int
    num_bytes: int


class Snapshot(Protocol):
    """Copies blocks out of the KV pool; the model runner's `snapshot`."""

    def __call__(self, blocks: Sequence[int], num_tokens: int) -> Payload:
        """The first `num_tokens` slots of `blocks`, and nothing of the slots after them."""
        ...


class Tier(Protocol):
    """A place for whole leases. Only the engine's thread calls it; no call waits for a write."""

    @property
    def name(self) -> str:
        """What records call it."""
        ...

    @property
    def keeps_all(self) -> bool:
        """Whether it takes every lease, or only those that persist."""
        ...

    def recover(self) -> list[Recovered]:
        """What an earlier engine left here. Called once, before anything else."""
        ...

    @property
    def free_bytes(self) -> int:
        """What is left of its budget."""
        ...

    def accepts(self, num_bytes: int) -> bool:
        """Whether it works and keeps up, budget aside."""
        ...

    def save(
        self, stored: StoredPrefix, payload: Payload, *, num_bytes: int, deadline_ms: int
    ) -> None:
        """Begin to keep a lease; `poll` tells when it is whole. Replaces nothing."""
        ...

    def poll(self) -> list[tuple[bytes, bool]]:
        """What was saved since the last call, and whether it is whole; not what was dropped."""
        ...

    def load(self, key: bytes) -> Payload | None:
        """A saved lease's payload; None if it is not whole any more, and then it is gone."""
        ...

    def extend(self, key: bytes, deadline_ms: int) -> None:
        """The lease lives longer."""
        ...

    def drop(self, key: bytes) -> None:
        """Forget the lease, also one that is still being saved. Idempotent."""
        ...

    def stats(self) -> dict[str, float]:
        """Gauges and counters by metric name."""
        ...


@dataclass(frozen=True, slots=True)
class Costs:
    """What decides between computing a prefix and reading it back, measured at start.

    prefill_tokens   tokens computed a second
    tier_bytes       bytes read a second, by tier; a tier that is absent is never worth it
    """

    prefill_tokens: float
    tier_bytes: dict[str, float]

    def pays(self, tier: str, *, num_bytes: int, num_tokens: int) -> bool:
        """Whether reading `num_bytes` back takes less time than computing `num_tokens`."""
        return num_bytes * self.prefill_tokens < num_tokens * self.tier_bytes.get(tier, 0.0)
