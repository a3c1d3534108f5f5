"""Block tables: which blocks a sequence reuses, allocates and adds to the prefix index.

match, fit, restore       what a sequence could reuse, and whether it fits now
attach, load, admit       its blocks allocated, its breakpoints granted, its record frozen
extend                    more blocks while it decodes
commit                    after each step: index its full blocks, turn reservations into leases
release, end              its blocks freed at preemption; its reservation too at its end
"""

from collections import Counter
from collections.abc import Iterable

from engine.blocks.pool import BlockPool
from engine.blocks.prefix_index import Match, PrefixIndex
from engine.config import EngineConfig
from engine.leases.leases import Leases
from engine.plan import BlockCopy, BlockLoad
from engine.scheduling.policy import ContiguousKV, PagedKV
from engine.scheduling.sequence import Sequence
from engine.tiers.lease_store import LeaseStore


class BlockTables:
    """Moves blocks between the pool, the prefix index, the leases and the running sequences."""

    def __init__(
        self,
        config: EngineConfig,
        layout: PagedKV | ContiguousKV,
        counts: Counter[str],
        *,
        boot_id: str,
        store: LeaseStore,
    ) -> None:
        """Start with an empty pool; `boot_id` goes into the records that admission freezes."""
        self._config = config
        self._layout = layout
        self._counts = counts
        self._boot_id = boot_id
        self.index = PrefixIndex(config.block_size, enabled=config.enable_prefix_caching)
        self.pool = BlockPool(config.num_blocks, self.index)
        self.leases = Leases(config, self.pool, store, boot_id=boot_id)

    # Before a sequence starts

    def match(self, sequence: Sequence) -> Match:
        """Return what a sequence that is not running could reuse now; changes nothing."""
        reservation = sequence.reservation
        if reservation is None or not reservation.blocks:
            return self.index.match(sequence.chain, sequence.num_tokens)
        # A preempted sequence goes on in the blocks that its reservation kept, so that they stay
        # the first blocks of its table. A kept block that never filled ends what can be matched.
        kept = reservation.blocks
        if reservation.num_tokens % self._config.block_size and not self.index.is_full(kept[-1]):
            return Match(list(kept), reservation.num_tokens)
        return self.index.match(sequence.chain, sequence.num_tokens, kept)

    def fit(self, sequence: Sequence, match: Match, *, num_running: int) -> Match | None:
        """Return what a sequence can use of its match if it starts now; None: it does not fit.

        Spilled leases are unpinned for it, but only if that makes it fit.
        """
        num_free = self.num_free_to_start(num_running)
        fitting = self._cut_to_fit(sequence, match, num_free)
        if fitting is not None:
            return fitting
        num_free += self.leases.count_freed_by_unpinning()
        if self._cut_to_fit(sequence, match, num_free) is not None:
            while fitting is None and self.leases.unpin_spilled():
                num_free = self.num_free_to_start(num_running)
                fitting = self._cut_to_fit(sequence, match, num_free)
        if fitting is None:
            self.pool.note_shortage()
        return fitting

    def would_fit(self, sequence: Sequence, *, num_running: int, after: Iterable[Sequence]) -> bool:
        """Return whether a sequence would fit once those of `after` have ended."""
        ending = {block for each in after for block in each.blocks}
        num_free = self.num_free_to_start(num_running) + self.leases.count_freed_by_unpinning()
        num_free += sum(not self.pool.is_pinned(block) for block in ending)
        return self._cut_to_fit(sequence, self.match(sequence), num_free) is not None

    def num_free_to_start(self, num_running: int) -> int:
        """Return how many free blocks a starting sequence may take.

        One for each sequence that grows stays free, so that no sequence starts only to be preempted
        at the next block boundary.
        """
        return self.pool.num_free - self._layout.num_growing(num_running)

    def restore(self, sequence: Sequence, match: Match) -> Match:
        """Return the match, lengthened by a stored lease if reading that one back pays."""
        if match.num_tokens % self._config.block_size and match.tail_source is None:
            return match  # its last block is kept and half full: only computing goes on in it
        return self.leases.restore(sequence.chain, sequence.num_tokens, match)

    # A sequence starts and runs

    def attach(self, sequence: Sequence, match: Match) -> BlockCopy | None:
        """Give a sequence its matched blocks, and new ones for its other tokens.

        Returns the copy of a shared tail that the step must make first, if there is one.
        """
        # Every matched block is referenced before any is allocated, because allocation evicts.
        for block in match.blocks:
            self.pool.attach(block)
            sequence.add_block(block)
        if match.tail_source is not None:
            self.pool.attach(match.tail_source)
        self._allocate(sequence, self._num_missing(sequence))
        sequence.chain.adopt(match.prefixes, len(match.blocks) - len(match.prefixes))
        sequence.num_computed = sequence.num_reused = match.num_tokens
        if match.tail_source is None:
            return None
        num_slots = match.num_tokens - len(match.blocks) * self._config.block_size
        return BlockCopy(match.tail_source, sequence.blocks[len(match.blocks)], num_slots)

    def load(self, sequence: Sequence, match: Match) -> BlockLoad | None:
        """Return the load that fills a sequence's blocks before the step, if it restores some."""
        if match.restored is None:
            return None
        first, stop = len(match.blocks), self._config.blocks_for(match.num_tokens)
        blocks = tuple(sequence.blocks[first:stop])
        return BlockLoad(blocks, match.restored.payload, skip=first)

    def admit(self, sequence: Sequence, match: Match, now_ms: int) -> None:
        """Grant or refuse the breakpoints of a sequence just attached, and freeze its record."""
        self._count_reuse(sequence, match)
        if sequence.request.breakpoints:
            self._decide_breakpoints(sequence, match)
        sequence.freeze(match, boot_id=self._boot_id, now_ms=now_ms)

    def extend(self, sequence: Sequence) -> bool:
        """Allocate the blocks that a running sequence lacks; returns false if too few are free.

        Spilled leases are unpinned first.
        """
        num_missing = self._num_missing(sequence)
        while self.pool.num_free < num_missing:
            if not self.leases.unpin_spilled():
                self.pool.note_shortage()
                return False
        self._allocate(sequence, num_missing)
        return True

    # After a step

    def commit(self, sequence: Sequence, num_new: int) -> list[int]:
        """Publish a sequence's `num_new` computed tokens.

        Returns the lengths of the breakpoints that became leases.
        """
        self._publish(sequence, num_new)
        committed = []
        while sequence.uncommitted:
            index = sequence.uncommitted[0]
            if sequence.grants[index].num_tokens > sequence.num_computed:
                break
            self._commit_grant(sequence, index)
            committed.append(sequence.grants[index].num_tokens)
        return committed

    def publish_restored(self, sequence: Sequence, match: Match) -> None:
        """Index the blocks that a stored lease filled, its tail included."""
        size = self._config.block_size
        for number in range(len(match.blocks), self._config.blocks_for(match.num_tokens)):
            end = min(match.num_tokens, (number + 1) * size)
            self.index.publish(sequence.chain, end, sequence.blocks[number])

    def release_copy_sources(self, copies: Iterable[BlockCopy]) -> None:
        """Drop the references that kept the sources of copies until their step had run."""
        self.pool.release([copy.source for copy in copies])

    def release(self, sequence: Sequence) -> None:
        """Drop a sequence's references on its blocks; its reservation keeps its pins."""
        self.pool.release(sequence.blocks)
        sequence.blocks.clear()

    def end(self, sequence: Sequence) -> None:
        """Free all that a sequence holds, its reservation included."""
        if sequence.reservation is not None:
            self.leases.cancel(sequence.reservation)
        self.release(sequence)

    def check_integrity(self, running: list[Sequence]) -> None:
        """Assert that references and pins are what sequences, leases and reservations hold."""
        refs = [0] * self.pool.num_blocks
        for sequence in running:
            for block in sequence.blocks:
                refs[block] += 1
            reserved = sequence.reservation.blocks if sequence.reservation else []
            assert sequence.blocks[: len(reserved)] == reserved, "reserved blocks not in table"
        self.pool.check_integrity(refs, self.leases.pins())
        self.leases.check_integrity()
        self.index.check_integrity()

    def _cut_to_fit(self, sequence: Sequence, match: Match, num_free: int) -> Match | None:
        """Return what of the match fits if `num_free` blocks may be taken."""
        num_free -= self.pool.count_free(match.blocks)
        num_missing = self._num_blocks(sequence) - len(match.blocks)
        if match.tail_source is not None:
            if num_missing + self.pool.count_free([match.tail_source]) <= num_free:
                return match
            # The copy's source must not be what keeps a sequence out of the last blocks.
            num_full_tokens = len(match.blocks) * self._config.block_size
            match = Match(match.blocks, num_full_tokens, None, match.prefixes)
        return match if num_missing <= num_free else None

    def _num_blocks(self, sequence: Sequence) -> int:
        """Return how many blocks a sequence has while it runs."""
        return self._config.blocks_for(self._layout.num_tokens_to_hold(sequence))

    def _num_missing(self, sequence: Sequence) -> int:
        return self._num_blocks(sequence) - len(sequence.blocks)

    def _allocate(self, sequence: Sequence, num_blocks: int) -> None:
        for _ in range(num_blocks):
            sequence.add_block(self.pool.allocate())

    def _count_reuse(self, sequence: Sequence, match: Match) -> None:
        size = self._config.block_size
        lease_read = size * sum(self.pool.is_pinned(block) for block in match.blocks)
        if match.tail_source is not None and self.pool.is_pinned(match.tail_source):
            lease_read += match.num_tokens - size * len(match.blocks)
        if match.restored is not None:
            lease_read += match.restored.num_tokens
        self._counts["prefix_tokens_queried_total"] += sequence.num_prompt
        self._counts["prefix_tokens_reused_total"] += match.num_tokens
        self._counts["prefix_tokens_lease_read_total"] += lease_read

    def _decide_breakpoints(self, sequence: Sequence, match: Match) -> None:
        reservation = self.leases.reserve(sequence.request.namespace, sequence.request_id)
        for index, breakpoint_ in enumerate(sequence.request.breakpoints):
            grant = self.leases.decide(
                breakpoint_,
                sequence.chain.at(breakpoint_.num_tokens),
                reservation,
                matched=match.blocks,
                deadline_ms=self._deadline_ms(sequence, index),
            )
            sequence.grants.append(grant)
            if grant.outcome != "refused":
                sequence.uncommitted.append(index)
            self._counts[f"lease_{grant.outcome}_total"] += 1
        if reservation.num_outstanding:
            sequence.reservation = reservation
        else:
            self.leases.cancel(reservation)

    def _publish(self, sequence: Sequence, num_new: int) -> None:
        """Mark tokens as computed and index the blocks that they filled."""
        size = self._config.block_size
        first = sequence.num_computed // size
        sequence.num_computed += num_new
        for number in range(first, sequence.num_computed // size):
            self.index.publish(sequence.chain, (number + 1) * size, sequence.blocks[number])

    def _commit_grant(self, sequence: Sequence, index: int) -> None:
        grant = sequence.grants[index]
        lease_id = grant.lease_id
        if grant.outcome == "granted":
            assert sequence.reservation is not None, "granted without a reservation"
            last_block = self._config.blocks_for(grant.num_tokens) - 1
            self.index.publish(sequence.chain, grant.num_tokens, sequence.blocks[last_block])
            lease_id = self.leases.commit(
                sequence.reservation,
                sequence.chain.at(grant.num_tokens),
                num_tokens=grant.num_tokens,
                table=sequence.blocks,
                deadline_ms=self._deadline_ms(sequence, index),
                persist=sequence.request.breakpoints[index].persist,
            )
        sequence.commit_next_grant(lease_id)

    def _deadline_ms(self, sequence: Sequence, index: int) -> int:
        """Return the deadline of a breakpoint's lease: later than its cache entry's end."""
        ttl_ms = sequence.request.breakpoints[index].ttl_ms
        return sequence.submitted_ms + ttl_ms + self._config.lease_grace_ms
