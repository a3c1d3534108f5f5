"""Block tables: which blocks a sequence can reuse, which it gets, and what is promised of them.

match -> fit -> attach -> answer the breakpoints     admission
commit                                               after each step: publish, make leases
release                                              preemption and end
"""

from collections import Counter

from engine.blocks.pool import BlockPool
from engine.blocks.prefix_index import Match, PrefixIndex
from engine.config import EngineConfig
from engine.leases.book import LeaseBook
from engine.plan import BlockCopy, BlockLoad
from engine.scheduling.sequence import Sequence
from engine.tiers.lease_store import LeaseStore


class BlockTables:
    """Moves blocks between the pool, the index, the leases and the sequences that run."""

    def __init__(
        self, config: EngineConfig, counts: Counter[str], *, boot_id: str, store: LeaseStore
    ) -> None:
        """Start with an empty pool; `boot_id` goes into the records that admission freezes."""
        self._config = config
        self._counts = counts
        self._boot_id = boot_id
        self.index = PrefixIndex(config.block_size, enabled=config.enable_prefix_caching)
        self.pool = BlockPool(config.num_blocks, self.index)
        self.leases = LeaseBook(config, self.pool, store, boot_id=boot_id)

    def match(self, sequence: Sequence) -> Match:
        """What a sequence that is not running could reuse now; changes nothing."""
        reservation = sequence.reservation
        if reservation is None or not reservation.blocks:
            return self.index.match(sequence.chain, sequence.num_tokens)
        # A preempted sequence goes on in the blocks that its reservation kept, so that they stay
        # the first blocks of its table. A kept block that never filled ends what can be matched.
        kept = reservation.blocks
        if reservation.tokens % self._config.block_size and not self.index.is_full(kept[-1]):
            return Match(list(kept), reservation.tokens)
        return self.index.match(sequence.chain, sequence.num_tokens, kept)

    def fit(self, sequence: Sequence, match: Match, *, room: int) -> Match | None:
        """What of the match it can use if `room` free blocks may be taken; None: it must wait."""
        room -= self.pool.count_free(match.blocks)
        num_missing = self._num_blocks(sequence) - len(match.blocks)
        if match.tail_source is not None:
            if num_missing + self.pool.count_free([match.tail_source]) <= room:
                return match
            # The copy's source must not be what keeps a sequence out of the last blocks.
            full_tokens = len(match.blocks) * self._config.block_size
            match = Match(match.blocks, full_tokens, None, match.prefixes)
        return match if num_missing <= room else None

    def restore(self, sequence: Sequence, match: Match) -> Match:
        """Let a stored lease lengthen the match of a sequence that starts now, if that pays."""
        if match.tokens % self._config.block_size and match.tail_source is None:
            return match  # its last block is kept and half full: only computing goes on in it
        return self.leases.restore(sequence.chain, sequence.num_tokens, match)

    def load(self, sequence: Sequence, match: Match) -> BlockLoad | None:
        """What is to be loaded before the step into the blocks of a sequence just attached."""
        if match.restored is None:
            return None
        first, stop = len(match.blocks), self._config.blocks_for(match.tokens)
        blocks = tuple(sequence.blocks[first:stop])
        return BlockLoad(blocks, match.restored.payload, skip=first)

    def publish_restored(self, sequence: Sequence, match: Match) -> None:
        """Index the blocks that a stored lease filled, its tail included."""
        size = self._config.block_size
        for number in range(len(match.blocks), self._config.blocks_for(match.tokens)):
            end = min(match.tokens, (number + 1) * size)
            self.index.publish(sequence.chain, end, sequence.blocks[number])

    def attach(self, sequence: Sequence, match: Match) -> BlockCopy | None:
        """Give a sequence its matched blocks and fresh ones for all its other tokens.

        A tail that it shares is to be copied before the step, and its source released after.
        """
        # Every matched block is held before any is allocated: allocation evicts.
        for block in match.blocks:
            self.pool.attach(block)
            sequence.add_block(block)
        if match.tail_source is not None:
            self.pool.attach(match.tail_source)
        self.extend(sequence)
        sequence.chain.adopt(match.prefixes, len(match.blocks) - len(match.prefixes))
        sequence.computed = sequence.num_reused = match.tokens
        if match.tail_source is None:
            return None
        num_slots = match.tokens - len(match.blocks) * self._config.block_size
        return BlockCopy(match.tail_source, sequence.blocks[len(match.blocks)], num_slots)

    def num_missing(self, sequence: Sequence) -> int:
        """How many blocks a sequence lacks for its tokens."""
        return self._num_blocks(sequence) - len(sequence.blocks)

    def extend(self, sequence: Sequence) -> None:
        """Add the blocks that a sequence lacks."""
        for _ in range(self.num_missing(sequence)):
            sequence.add_block(self.pool.allocate())

    def answer(self, sequence: Sequence, match: Match, now_ms: int) -> None:
        """Answer the breakpoints of a sequence that was just attached and freeze its record."""
        self._count_reuse(sequence, match)
        if sequence.request.breakpoints:
            self._answer_breakpoints(sequence, match)
        sequence.freeze(match, boot_id=self._boot_id, now_ms=now_ms)

    def commit(self, sequence: Sequence, num_new: int) -> list[int]:
        """Publish a sequence's `num_new` computed tokens; the breakpoints that this commits."""
        self._publish(sequence, num_new)
        committed = []
        while sequence.uncommitted:
            index = sequence.uncommitted[0]
            if sequence.grants[index].num_tokens > sequence.computed:
                break
            self._commit_grant(sequence, index)
            committed.append(sequence.grants[index].num_tokens)
        return committed

    def release(self, sequence: Sequence) -> None:
        """Take all blocks from a sequence; what its reservation pins stays pinned."""
        self.pool.release(sequence.blocks)
        sequence.blocks.clear()

    def check_integrity(self, running: list[Sequence]) -> None:
        """Assert that the blocks are where their counts say."""
        refs = [0] * self.pool.num_blocks
        for sequence in running:
            for block in sequence.blocks:
                refs[block] += 1
            reserved = sequence.reservation.blocks if sequence.reservation else []
            assert sequence.blocks[: len(reserved)] == reserved, "reserved blocks not in table"
        self.pool.check_integrity(refs, self.leases.pins())
        self.leases.check_integrity()
        self.index.check_integrity()

    def _num_blocks(self, sequence: Sequence) -> int:
        """How many blocks a running sequence has."""
        is_paged = self._config.kv_layout == "paged"
        return self._config.blocks_for(sequence.num_tokens if is_paged else sequence.capacity)

    def _count_reuse(self, sequence: Sequence, match: Match) -> None:
        size = self._config.block_size
        lease_read = size * sum(self.pool.is_pinned(block) for block in match.blocks)
        if match.tail_source is not None and self.pool.is_pinned(match.tail_source):
            lease_read += match.tokens - size * len(match.blocks)
        if match.restored is not None:
            lease_read += match.restored.tokens
        self._counts["prefix_tokens_queried_total"] += sequence.num_prompt
        self._counts["prefix_tokens_reused_total"] += match.tokens
        self._counts["prefix_tokens_lease_read_total"] += lease_read

    def _answer_breakpoints(self, sequence: Sequence, match: Match) -> None:
        reservation = self.leases.reserve(sequence.request.namespace, sequence.request_id)
        for index, breakpoint_ in enumerate(sequence.request.breakpoints):
            grant = self.leases.answer(
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
        """Advance over the new tokens and index the blocks that they filled."""
        size = self._config.block_size
        first = sequence.computed // size
        sequence.computed += num_new
        for number in range(first, sequence.computed // size):
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
                tokens=grant.num_tokens,
                table=sequence.blocks,
                deadline_ms=self._deadline_ms(sequence, index),
                persist=sequence.request.breakpoints[index].persist,
            )
        sequence.commit_next_grant(lease_id)

    def _deadline_ms(self, sequence: Sequence, index: int) -> int:
        """When the lease of a breakpoint ends: it outlives the entry that it serves."""
        ttl_ms = sequence.request.breakpoints[index].ttl_ms
        return sequence.submitted_ms + ttl_ms + self._config.lease_grace_ms
