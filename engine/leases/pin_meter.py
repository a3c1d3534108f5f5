"""Measures how long each lease pins blocks, idle or in place of blocks that were evicted.

A block that several leases pin is paid for once: by the oldest of them and, when that one ends, by
the next oldest. So at any moment the paid blocks of all leases are exactly the distinct leased
blocks, and the sum over all leases is the integral of their number over time.

A lease's time is *contended* while its blocks would have been evicted without the pin, else *idle*.
The pool evicts the least recently used block first. So a lease becomes contended once the pool has
evicted a block that was used later than the lease, or had no block left to evict. The next use of
the lease makes it idle again.
"""

from bisect import bisect_left, insort

from engine.blocks.pool import BlockPool
from engine.lease_types import Lease


class PinMeter:
    """Integrates the pinned blocks of each lease over time. Call `tick` first in every step."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        """Start with nothing pinned."""
        self._pool = pool
        self._block_size = block_size
        self._holders: dict[int, list[Lease]] = {}  # a block's leases, oldest first
        # Idle leases in the order of eviction, as (last use, number, lease).
        self._idle: list[tuple[int, int, Lease]] = []

    def hold(self, lease: Lease, now_ms: int) -> None:
        """Start to count a lease's blocks."""
        lease.since_ms = now_ms
        for block in lease.blocks:
            holders = self._holders.setdefault(block, [])
            lease.num_paid_blocks += not holders
            holders.append(lease)
        self._warm(lease, self._pool.use_now)

    def use(self, lease: Lease, now_ms: int) -> None:
        """Record a read: without the pin, the lease's blocks would be the most recently used."""
        if lease.blocks:
            self.settle(lease, now_ms)
            self._cool(lease)
            self._warm(lease, self._pool.use_now)

    def release(self, lease: Lease, now_ms: int) -> None:
        """Stop counting a lease's blocks; the next oldest lease of each block pays for it."""
        self.settle(lease, now_ms)
        for block in lease.blocks:
            holders = self._holders[block]
            was_paying = holders[0] is lease
            holders.remove(lease)
            if not holders:
                del self._holders[block]
            elif was_paying:
                self.settle(holders[0], now_ms)
                holders[0].num_paid_blocks += 1
        lease.num_paid_blocks = 0
        self._cool(lease)

    def settle(self, lease: Lease, now_ms: int) -> None:
        """Update the lease's totals to `now_ms`."""
        block_ms = lease.num_paid_blocks * (now_ms - lease.since_ms)
        if lease.is_contended:
            lease.contended_block_ms += block_ms
        else:
            lease.idle_block_ms += block_ms
        lease.since_ms = now_ms

    def tick(self, now_ms: int) -> None:
        """Mark the leases that have become contended."""
        evicted_use = self._pool.evicted_use
        while self._idle and self._idle[0][0] < evicted_use:
            lease = self._idle[0][2]
            self._cool(lease)
            # Reading a longer prefix uses this one too: its last full block shows that.
            last_full = max(0, lease.num_tokens // self._block_size - 1)
            last_use = self._pool.last_use(lease.blocks[last_full])
            if last_use >= evicted_use:
                self._warm(lease, last_use)
            else:
                self.settle(lease, now_ms)
                lease.is_contended = True

    def num_leased_blocks(self) -> int:
        """Return how many distinct blocks leases pin."""
        return len(self._holders)

    def _warm(self, lease: Lease, last_use: int) -> None:
        lease.last_use, lease.is_contended = last_use, False
        insort(self._idle, (last_use, lease.number, lease))

    def _cool(self, lease: Lease) -> None:
        if not lease.is_contended:
            del self._idle[bisect_left(self._idle, (lease.last_use, lease.number, lease))]
