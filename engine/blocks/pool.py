"""The block pool: reference and pin counts of the KV blocks, allocation and eviction.

    free    [ empty ] [ ended leases | oldest cached ... newest cached ]
              ^ allocate takes these first, from the left

A block is free exactly while no running sequence (ref 0) and no lease (pin 0) uses it. A free block
keeps its index entries until it is allocated again.

The pool counts uses, one for each block table that is released. From the count at its last use
`engine.leases.pin_meter` finds out when a pinned block would have been evicted without its pin.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from engine.blocks.prefix_index import PrefixIndex


class BlockPool:
    """Reference counts, pin counts, and the free blocks in the order of their eviction."""

    def __init__(self, num_blocks: int, index: PrefixIndex) -> None:
        """Start with every block free; a block that is allocated is dropped from `index`."""
        self.num_blocks = num_blocks
        self._index = index
        self._refs = [0] * num_blocks
        self._pins = [0] * num_blocks
        self._num_pinned = 0
        # Pins of leases that can be unpinned at any time; a block with no other pin is spare.
        self._spare_pins = [0] * num_blocks
        self._num_spare = 0
        # Free blocks in the order of allocation: those that serve no prefix, then those that do.
        self._empty: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._last_uses = [0] * num_blocks
        self.use_now = 1
        self.evicted_use = 0  # the latest last use among all blocks evicted so far

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, cached ones included."""
        return len(self._empty) + len(self._cached)

    @property
    def num_pinned(self) -> int:
        """Distinct blocks with a pin."""
        return self._num_pinned

    @property
    def num_evictable(self) -> int:
        """Free blocks that still serve some prefix."""
        return len(self._cached)

    def free_blocks(self) -> list[int]:
        """Return the free blocks, next to be allocated first."""
        return [*self._empty, *self._cached]

    def is_pinned(self, block: int) -> bool:
        """Return whether a lease or reservation pins the block."""
        return self._pins[block] > 0

    @property
    def num_spare(self) -> int:
        """Blocks that would become free if every spare pin were dropped."""
        return self._num_spare

    def is_spare(self, block: int) -> bool:
        """Return whether the block would be free without its spare pins."""
        return 0 < self._spare_pins[block] == self._pins[block] and not self._refs[block]

    def is_pinned_only_spare(self, block: int) -> bool:
        """Return whether all pins of a pinned block are spare."""
        return 0 < self._spare_pins[block] == self._pins[block]

    def count_spare_pins(self, block: int, num_pins: int) -> None:
        """Add to the pins of a block that are spare, or subtract from them."""
        was_spare = self.is_spare(block)
        self._spare_pins[block] += num_pins
        self._num_spare += self.is_spare(block) - was_spare

    def count_free(self, blocks: Iterable[int]) -> int:
        """Return how many of these blocks are free."""
        return sum(block in self._empty or block in self._cached for block in blocks)

    def last_use(self, block: int) -> int:
        """Return the count of uses at the block's last use; the present count if it is in use."""
        return self.use_now if self._refs[block] else self._last_uses[block]

    def note_shortage(self) -> None:
        """Record that too few blocks were free: all unused ones would be evicted but for pins."""
        self.evicted_use = self.use_now

    def allocate(self) -> int:
        """Return the first free block, with one reference and without its index entries."""
        assert self.num_free, "allocated from an empty pool"
        if self._empty:
            block, _ = self._empty.popitem(last=False)
        else:
            block, _ = self._cached.popitem(last=False)
            self.evicted_use = max(self.evicted_use, self._last_uses[block])
        for heir in self._index.drop(block):
            if heir in self._empty:  # it serves the prefix now
                del self._empty[heir]
                self._cached[heir] = None
                self._cached.move_to_end(heir, last=False)
        self._refs[block] = 1
        return block

    def attach(self, block: int) -> None:
        """Add a reference."""
        self._num_spare -= self.is_spare(block)
        self._refs[block] += 1
        self._take(block)

    def release(self, table: Sequence[int]) -> None:
        """Drop a reference on each block of a table; its last block will be evicted first."""
        self.use_now += 1
        for block in reversed(table):
            assert self._refs[block] > 0, f"released too often: {block}"
            self._refs[block] -= 1
            self._num_spare += self.is_spare(block)
            self._last_uses[block] = self.use_now
            self._free_if_unused(block, cold=False)

    def pin(self, block: int) -> bool:
        """Add a pin; returns whether it is the block's first."""
        self._num_spare -= self.is_spare(block)
        self._pins[block] += 1
        self._take(block)
        is_first = self._pins[block] == 1
        self._num_pinned += is_first
        return is_first

    def unpin(self, block: int, *, cold: bool) -> bool:
        """Drop a pin; returns whether it was the last. A cold block is evicted before warm ones."""
        assert self._pins[block] > 0, f"unpinned too often: {block}"
        was_spare = self.is_spare(block)
        self._pins[block] -= 1
        self._num_spare += self.is_spare(block) - was_spare
        is_last = self._pins[block] == 0
        self._num_pinned -= is_last
        self._free_if_unused(block, cold=cold)
        return is_last

    def check_integrity(self, refs: Sequence[int], pins: Sequence[int]) -> None:
        """Assert that the counts equal those of the holders, and that free + used = all."""
        assert list(refs) == self._refs, "references differ from the running tables"
        assert list(pins) == self._pins, "pins differ from leases and reservations"
        unused = {b for b in range(self.num_blocks) if not (self._refs[b] or self._pins[b])}
        assert unused == {*self._empty, *self._cached}, "free are not exactly the unused blocks"
        num_spare = sum(self.is_spare(block) for block in range(self.num_blocks))
        assert self._num_spare == num_spare, "spare blocks miscounted"
        assert self._num_pinned == sum(count > 0 for count in self._pins), "pinned miscounted"
        serving = {block for block in unused if self._index.is_serving(block)}
        assert serving == set(self._cached), "cached are not exactly the free blocks that serve"

    def _take(self, block: int) -> None:
        """Remove a block from the free ones, if it is free."""
        self._empty.pop(block, None)
        self._cached.pop(block, None)

    def _free_if_unused(self, block: int, *, cold: bool) -> None:
        if self._refs[block] or self._pins[block]:
            return
        if not self._index.is_serving(block):
            self._empty[block] = None
            self._empty.move_to_end(block, last=False)
            return
        self._cached[block] = None
        self._cached.move_to_end(block, last=not cold)
        if cold:
            self._last_uses[block] = 0  # evicted first, however recently it was used
