"""Held blocks: what leases and reservations hold of the pool, against the cap and each quota.

Held = distinct pinned blocks + blocks counted by reservations that are still to be computed.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Literal

from engine.blocks.pool import BlockPool
from engine.config import EngineConfig
from engine.lease_types import Lease, Reservation


class Holdings:
    """Pins on the pool's blocks, by owner. Owners never share a block."""

    def __init__(self, config: EngineConfig, pool: BlockPool) -> None:
        """Start with nothing held."""
        self._config = config
        self._pool = pool
        self._held: Counter[bytes] = Counter()
        self.num_held = 0

    def excess(self, owner: bytes, num_new: int) -> Literal["quota", "capacity"] | None:
        """Return which limit `num_new` more blocks would exceed; None: neither."""
        if self._held[owner] + num_new > self._config.namespace_quota_blocks:
            return "quota"
        if self.num_held + num_new > self._config.pin_cap_blocks:
            return "capacity"
        return None

    def pin(self, owner: bytes, block: int) -> None:
        """Add a pin; the first pin of a block counts as one held block."""
        if self._pool.pin(block):
            self.count(owner, 1)

    def unpin(self, owner: bytes, block: int, *, cold: bool) -> None:
        """Drop a pin; after the last pin, a cold block is evicted before all warm ones."""
        if self._pool.unpin(block, cold=cold):
            self.count(owner, -1)

    def count(self, owner: bytes, num_blocks: int) -> None:
        """Add to the held blocks, or subtract from them, without pinning."""
        self.num_held += num_blocks
        self._held[owner] += num_blocks
        if self._held[owner] == 0:
            del self._held[owner]

    def check_integrity(self, leases: Iterable[Lease], reservations: Iterable[Reservation]) -> None:
        """Assert that the counts equal the holders' blocks, within the cap and each quota."""
        blocks: defaultdict[bytes, set[int]] = defaultdict(set)
        num_counted: Counter[bytes] = Counter()
        holders: list[Lease | Reservation] = [*leases, *reservations]
        for holder in holders:
            blocks[holder.owner].update(holder.blocks)
        for reservation in reservations:
            num_counted[reservation.owner] += reservation.num_blocks - len(reservation.blocks)
        held = {owner: len(blocks[owner]) + num_counted[owner] for owner in blocks}
        assert +Counter(held) == +self._held, "held blocks miscounted"
        assert self.num_held == sum(held.values()), "total of held blocks miscounted"
        assert self.num_held <= self._config.pin_cap_blocks, f"pin cap broken: {self.num_held}"
        for owner, num_held in held.items():
            quota = self._config.namespace_quota_blocks
            assert num_held <= quota, f"quota broken: {owner.hex()} holds {num_held}"
