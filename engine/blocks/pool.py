"""The block pool: who uses each KV block, and which one is given up next.

    free    [ empty ] [ ended leases | oldest cached ... newest cached ]
              ^ allocate takes from here, and then from there

A block is free exactly while nobody runs on it (ref 0) and no lease holds it (pin 0).
Being free does not empty it: its index entries live until the block is allocated again.

Uses are counted, one for each table that is released. The count at a block's last use says how long
a pinned block would have survived without its pin; `engine.leases.pin_meter` asks.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from engine.blocks.prefix_index import PrefixIndex


class BlockPool:
    """Reference counts, pin counts, and the free blocks in the order of their eviction."""

    def __init__(self, num_blocks: int, index: PrefixIndex) -> None:
        """Start with every block free; `index` hears of each block that is reused."""
        self.num_blocks = num_blocks
        self._index = index
        self._refs = [0] * num_blocks
        self._pins = [0] * num_blocks
        self._num_pinned = 0
        # Free blocks, next to be allocated first: those that serve no prefix, and those that do.
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
        """The free blocks, next to be allocated first."""
        return [*self._empty, *self._cached]

    def is_pinned(self, block: int) -> bool:
        """Whether some lease or reservation holds the block."""
        return self._pins[block] > 0

    def is_freed_by(self, num_pins: int, block: int) -> bool:
        """Whether the block would be free with so many pins less."""
        return self._pins[block] == num_pins and not self._refs[block]

    def count_free(self, blocks: Iterable[int]) -> int:
        """How many of these blocks are free."""
        return sum(block in self._empty or block in self._cached for block in blocks)

    def last_use(self, block: int) -> int:
        """The count of uses when the block was last in use; the present one while it is."""
        return self.use_now if self._refs[block] else self._last_uses[block]

    def note_shortage(self) -> None:
        """More blocks were wanted than are free: nothing that is not in use would be left."""
        self.evicted_use = self.use_now

    def allocate(self) -> int:
        """Take the first free block, forgetting what it cached, with one reference on it."""
        assert self.num_free, "allocated from an empty pool"
        if self._empty:
            block, _ = self._empty.popitem(last=False)
        else:
            block, _ = self._cached.popitem(last=False)
            self.evicted_use = max(self.evicted_use, self._last_uses[block])
        for heir in self._index.drop(block):
            if heir in self._empty:  # it serves now what the block served
                del self._empty[heir]
                self._cached[heir] = None
                self._cached.move_to_end(heir, last=False)
        self._refs[block] = 1
        return block

    def attach(self, block: int) -> None:
        """Add a reference."""
        self._refs[block] += 1
        self._take(block)

    def release(self, table: Sequence[int]) -> None:
        """Drop a reference on each block of a table; later blocks will be evicted earlier."""
        self.use_now += 1
        for block in reversed(table):
            assert self._refs[block] > 0, f"released too often: {block}"
            self._refs[block] -= 1
            self._last_uses[block] = self.use_now
            self._free_if_unused(block, cold=False)

    def pin(self, block: int) -> bool:
        """Add a pin; whether it is the block's first."""
        self._pins[block] += 1
        self._take(block)
        is_first = self._pins[block] == 1
        self._num_pinned += is_first
        return is_first

    def unpin(self, block: int, *, cold: bool) -> bool:
        """Drop a pin; whether it was the last. A cold block is evicted before all warm ones."""
        assert self._pins[block] > 0, f"unpinned too often: {block}"
        self._pins[block] -= 1
        is_last = self._pins[block] == 0
        self._num_pinned -= is_last
        self._free_if_unused(block, cold=cold)
        return is_last

    def check_integrity(self, refs: Sequence[int], pins: Sequence[int]) -> None:
        """Assert that the counts equal those their holders report and that free + used = all."""
        assert list(refs) == self._refs, "references differ from the running tables"
        assert list(pins) == self._pins, "pins differ from leases and reservations"
        unused = {b for b in range(self.num_blocks) if not (self._refs[b] or self._pins[b])}
        assert unused == {*self._empty, *self._cached}, "free are not exactly the unused blocks"
        assert self._num_pinned == sum(count > 0 for count in self._pins), "pinned miscounted"
        serving = {block for block in unused if self._index.is_serving(block)}
        assert serving == set(self._cached), "cached are not exactly the free blocks that serve"

    def _take(self, block: int) -> None:
        """Take a block that gets a holder from the free ones, if it is among them."""
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
            self._last_uses[block] = 0  # it goes first, however lately it was used
