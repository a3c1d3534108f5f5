"""The scheduler: which sequences compute how many tokens in the next step, in which blocks.

There are no phases: one token budget serves running sequences in arrival order, be it a decode or
the rest of a prompt, and then the queue, first in, first out. Two rules keep it from hanging: a
waiting sequence holds no block except through its reservation, and when blocks run out the
youngest running sequence gives up its own.
"""

from collections import Counter, deque

from engine.blocks import BlockPool
from engine.config import EngineConfig
from engine.lease_store import LeaseStore
from engine.leases import LeaseBook
from engine.plan import BlockCopy, BlockLoad
from engine.prefix_index import Match, PrefixIndex
from engine.sequence import Sequence
from engine.step import Step


class Scheduler:
    """The queue, the running sequences, and the blocks that they share."""

    def __init__(self, config: EngineConfig, *, boot_id: str, store: LeaseStore) -> None:
        """Start idle; `boot_id` goes into the records that admission freezes."""
        self._config = config
        self._boot_id = boot_id
        self.index = PrefixIndex(config.block_size, enabled=config.enable_prefix_caching)
        self.pool = BlockPool(config.num_blocks, self.index)
        self.leases = LeaseBook(config, self.pool, store, boot_id=boot_id)
        # Everyone waiting arrived after everyone running, so both stay in arrival order.
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.counts: Counter[str] = Counter()

    def schedule(self, now_ms: int) -> Step:
        """Plan the next step and move its sequences into their blocks."""
        step = Step(budget_left=self._config.max_num_batched_tokens)
        if self._serve_running(step):
            self._serve_waiting(step, now_ms)
        return step

    def commit(self, step: Step) -> list[tuple[Sequence, int]]:
        """Publish what an executed step computed.

        Returns the breakpoints it committed, as (sequence, tokens).
        """
        self._release_copy_sources(step)
        for sequence, match in step.restored:
            self._publish_restored(sequence, match)
        committed = []
        for sequence, num_new in step.scheduled:
            self._publish(sequence, num_new)
            while sequence.uncommitted:
                index = sequence.uncommitted[0]
                if sequence.grants[index].tokens > sequence.computed:
                    break
                self._commit_grant(sequence, index)
                committed.append((sequence, sequence.grants[index].tokens))
        return committed

    def abandon(self, step: Step) -> None:
        """Give up a step whose execution failed; its sequences are the caller's to remove."""
        self._release_copy_sources(step)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, in whatever state it is, and free all that it holds."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        if sequence.reservation is not None:
            self.leases.cancel(sequence.reservation)
        self._release_table(sequence)

    def check_integrity(self) -> None:
        """Assert what must hold between any two steps."""
        refs = [0] * self.pool.num_blocks
        for sequence in self.running:
            for block in sequence.blocks:
                refs[block] += 1
            reserved = sequence.reservation.blocks if sequence.reservation else []
            assert sequence.blocks[: len(reserved)] == reserved, "reserved blocks not in table"
        self.pool.check_integrity(refs, self.leases.pins())
        self.leases.check_integrity()
        self.index.check_integrity()
        assert not any(sequence.blocks for sequence in self.waiting), "a waiting one holds blocks"

    # Running sequences

    def _serve_running(self, step: Step) -> bool:
        """Plan the running sequences; whether nobody had to be preempted for it."""
        num_preempted = self.counts["preemptions_total"]
        position = 0
        while position < len(self.running) and step.budget_left > 0:
            sequence = self.running[position]  # whoever is preempted stands behind it
            position += 1
            num_new = self._affordable(step, sequence.tokens_to_next_cut())
            if num_new and self._make_room(sequence, sequence.computed + num_new):
                step.add(sequence, num_new)
        return self.counts["preemptions_total"] == num_preempted

    def _affordable(self, step: Step, num_wanted: int) -> int:
        """How many of the wanted tokens the step's budget allows."""
        if num_wanted <= step.budget_left:
            return num_wanted
        if self._config.enable_chunked_prefill:
            return step.budget_left
        # An unchunked prompt may be longer than any budget: it must be its step's only prompt.
        return 0 if step.has_prompt() else num_wanted

    def _make_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Extend the table to `num_tokens`; false when the sequence itself was preempted."""
        num_missing = self._config.blocks_for(num_tokens) - len(sequence.blocks)
        while self.pool.num_free < num_missing:
            if self.leases.give_up():
                continue
            self.pool.note_shortage()
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return False
        for _ in range(num_missing):
            sequence.add_block(self.pool.allocate())
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Put the youngest running sequence back to the head of the queue, without its blocks."""
        assert self.running.pop() is sequence, "only the youngest is preempted"
        self._release_table(sequence)
        sequence.num_preemptions += 1
        self.waiting.appendleft(sequence)
        self.counts["preemptions_total"] += 1

    # Admission

    def _serve_waiting(self, step: Step, now_ms: int) -> None:
        while (
            self.waiting and step.budget_left > 0 and len(self.running) < self._config.max_num_seqs
        ):
            sequence = self.waiting[0]
            match = self._fitting_match(sequence)
            while match is None and self.leases.give_up():
                match = self._fitting_match(sequence)
            if match is None:
                self.pool.note_shortage()
                break
            if self._affordable(step, sequence.num_tokens - match.tokens) == 0:
                break
            self.waiting.popleft()
            match = self._restore(sequence, match)
            self._attach(sequence, match, step)
            if sequence.was_admitted:
                sequence.tokens_recomputed_preemption += max(0, sequence.computed - match.tokens)
            else:
                self._admit(sequence, match, now_ms)
                step.admitted.append(sequence)
            sequence.computed = match.tokens
            self.running.append(sequence)
            step.add(sequence, self._affordable(step, sequence.tokens_to_next_cut()))

    def _fitting_match(self, sequence: Sequence) -> Match | None:
        """What the sequence can reuse, if the blocks for the rest of its tokens are free.

        One more block for each running sequence stays free, so that a newcomer is not admitted
        only to be preempted at the next block boundary.
        """
        match = self._match(sequence)
        num_free = self.pool.num_free - len(self.running) - self.pool.count_free(match.blocks)
        num_missing = self._config.blocks_for(sequence.num_tokens) - len(match.blocks)
        if match.tail_source is not None:
            if num_missing + self.pool.count_free([match.tail_source]) <= num_free:
                return match
            # The copy's source must not be what keeps a sequence out of the last blocks.
            full_tokens = len(match.blocks) * self._config.block_size
            match = Match(match.blocks, full_tokens, None, match.prefixes)
        return match if num_missing <= num_free else None

    def _match(self, sequence: Sequence) -> Match:
        reservation = sequence.reservation
        if reservation is None or not reservation.blocks:
            return self.index.match(sequence.chain, sequence.num_tokens)
        # A preempted sequence goes on in the blocks that its reservation kept, so that they stay
        # the first blocks of its table. A kept block that never filled ends what can be matched.
        kept = reservation.blocks
        if reservation.tokens % self._config.block_size and not self.index.is_full(kept[-1]):
            return Match(list(kept), reservation.tokens)
        return self.index.match(sequence.chain, sequence.num_tokens, kept)

    def _restore(self, sequence: Sequence, match: Match) -> Match:
        """Let a stored lease fill what the index does not have, if that pays."""
        if match.tokens % self._config.block_size and match.tail_source is None:
            return match  # its last block is kept and half full: only computing goes on in it
        return self.leases.restore(sequence.chain, sequence.num_tokens, match)

    def _attach(self, sequence: Sequence, match: Match, step: Step) -> None:
        """Give the sequence its matched blocks, fresh ones for the rest, and its tail by copy."""
        # Every matched block is held before any is allocated: allocation evicts.
        for block in match.blocks:
            self.pool.hold(block)
            sequence.add_block(block)
        if match.tail_source is not None:
            self.pool.hold(match.tail_source)
        for _ in range(self._config.blocks_for(sequence.num_tokens) - len(match.blocks)):
            sequence.add_block(self.pool.allocate())
        if match.tail_source is not None:
            target = sequence.blocks[len(match.blocks)]
            num_slots = match.tokens - len(match.blocks) * self._config.block_size
            step.copies.append(BlockCopy(match.tail_source, target, num_slots))
        if match.restored is not None:
            first, stop = len(match.blocks), self._config.blocks_for(match.tokens)
            blocks = tuple(sequence.blocks[first:stop])
            step.loads.append(BlockLoad(blocks, match.restored.payload, skip=first))
            step.restored.append((sequence, match))
        sequence.chain.adopt(match.prefixes, len(match.blocks) - len(match.prefixes))

    def _admit(self, sequence: Sequence, match: Match, now_ms: int) -> None:
        """Answer the breakpoints of a first admission and freeze its record."""
        self._count_reuse(sequence, match)
        if sequence.request.breakpoints:
            self._answer_breakpoints(sequence, match)
        sequence.freeze(match, boot_id=self._boot_id, now_ms=now_ms)

    def _count_reuse(self, sequence: Sequence, match: Match) -> None:
        size = self._config.block_size
        lease_read = size * sum(self.pool.is_pinned(block) for block in match.blocks)
        if match.tail_source is not None and self.pool.is_pinned(match.tail_source):
            lease_read += match.tokens - size * len(match.blocks)
        if match.restored is not None:
            lease_read += match.restored.tokens
        self.counts["prefix_tokens_queried_total"] += sequence.num_prompt
        self.counts["prefix_tokens_reused_total"] += match.tokens
        self.counts["prefix_tokens_lease_read_total"] += lease_read

    def _answer_breakpoints(self, sequence: Sequence, match: Match) -> None:
        reservation = self.leases.reserve(sequence.request.namespace, sequence.request_id)
        for index, breakpoint_ in enumerate(sequence.request.breakpoints):
            grant = self.leases.answer(
                breakpoint_,
                sequence.chain.at(breakpoint_.tokens),
                reservation,
                matched=match.blocks,
                deadline_ms=self._deadline_ms(sequence, index),
            )
            sequence.grants.append(grant)
            if grant.outcome != "refused":
                sequence.uncommitted.append(index)
            self.counts[f"lease_{grant.outcome}_total"] += 1
        if reservation.num_outstanding:
            sequence.reservation = reservation
        else:
            self.leases.cancel(reservation)

    # Commit

    def _publish(self, sequence: Sequence, num_new: int) -> None:
        """Advance over the new tokens and index the blocks that they filled."""
        size = self._config.block_size
        first = sequence.computed // size
        sequence.computed += num_new
        for number in range(first, sequence.computed // size):
            self.index.publish(sequence.chain, (number + 1) * size, sequence.blocks[number])

    def _publish_restored(self, sequence: Sequence, match: Match) -> None:
        """Index the blocks that a stored lease filled, its tail included."""
        size = self._config.block_size
        for number in range(len(match.blocks), self._config.blocks_for(match.tokens)):
            end = min(match.tokens, (number + 1) * size)
            self.index.publish(sequence.chain, end, sequence.blocks[number])

    def _commit_grant(self, sequence: Sequence, index: int) -> None:
        grant = sequence.grants[index]
        lease_id = grant.lease_id
        if grant.outcome == "granted":
            assert sequence.reservation is not None, "granted without a reservation"
            last_block = self._config.blocks_for(grant.tokens) - 1
            self.index.publish(sequence.chain, grant.tokens, sequence.blocks[last_block])
            lease_id = self.leases.commit(
                sequence.reservation,
                sequence.chain.at(grant.tokens),
                tokens=grant.tokens,
                table=sequence.blocks,
                deadline_ms=self._deadline_ms(sequence, index),
                persist=sequence.request.breakpoints[index].persist,
            )
        sequence.commit_next_grant(lease_id)

    def _deadline_ms(self, sequence: Sequence, index: int) -> int:
        """When the lease of a breakpoint ends: it outlives the entry that it serves."""
        ttl_ms = sequence.request.breakpoints[index].ttl_ms
        return sequence.submitted_ms + ttl_ms + self._config.lease_grace_ms

    # Giving back

    def _release_copy_sources(self, step: Step) -> None:
        self.pool.release([copy.source for copy in step.copies])

    def _release_table(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks.clear()
