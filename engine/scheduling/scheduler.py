"""The scheduler: which sequences compute how many tokens in the next step.

There are no phases: one token budget serves first everyone who decodes, then prompts in the turns
of their namespaces, those that run and those that wait. Two rules keep it from hanging: a waiting
sequence holds no block except through its reservation, and when blocks run out the youngest running
sequence gives up its own.
"""

import math
from collections import Counter, deque

from engine.blocks.prefix_index import Match
from engine.config import EngineConfig
from engine.scheduling.in_flight import InFlight
from engine.scheduling.sequence import Sequence
from engine.scheduling.step import Step
from engine.scheduling.tables import BlockTables
from engine.scheduling.turns import Turns
from engine.scheduling.waiting import WaitingQueue
from engine.tiers.lease_store import LeaseStore


class Scheduler:
    """The queue and the running sequences."""

    def __init__(self, config: EngineConfig, *, boot_id: str, store: LeaseStore) -> None:
        """Start idle; `boot_id` goes into the records that admission freezes."""
        self._config = config
        self.counts: Counter[str] = Counter()
        self.tables = BlockTables(config, self.counts, boot_id=boot_id, store=store)
        self.index = self.tables.index
        self.pool = self.tables.pool
        self.leases = self.tables.leases
        self.in_flight = InFlight(config)
        self.waiting = WaitingQueue()
        # In the order of first admission; whoever is preempted comes after all who run.
        self.running: list[Sequence] = []
        self._turns = Turns(config.max_num_batched_tokens)
        self._batch_left = math.inf  # how many more the batch takes in, when batches are static
        self._full_at: int | None = None  # the room in which the last one did not fit

    def schedule(self, now_ms: int) -> Step:
        """Plan the next step and move its sequences into their blocks."""
        step = Step(budget_left=self._config.max_num_batched_tokens)
        is_static = self._config.scheduling == "static"
        if is_static and not (self.running or self.waiting.preempted):
            self._batch_left = self._config.max_num_seqs
        num_preempted = self.counts["preemptions_total"]
        self._serve_decodes(step)
        if self.counts["preemptions_total"] == num_preempted and self._has_new_room():
            self._resume_preempted(step)
            step.is_open = not self.waiting.preempted
        self._serve_prompts(step, now_ms)
        if is_static and step.budget_left > 0:
            self._batch_left = 0  # all who wanted and could are in
        return step

    def commit(self, step: Step) -> list[tuple[Sequence, int]]:
        """Publish what an executed step computed.

        Returns the breakpoints it committed, as (sequence, tokens).
        """
        self._release_copy_sources(step)
        self._count_occupancy(step)
        for sequence, match in step.restored:
            self.tables.publish_restored(sequence, match)
        committed = []
        for sequence, num_new in step.scheduled:
            committed += [(sequence, n) for n in self.tables.commit(sequence, num_new)]
            if sequence in self.in_flight:
                self.in_flight.advance(sequence)
        return committed

    def abandon(self, step: Step) -> None:
        """Give up a step whose execution failed; its sequences are the caller's to remove."""
        self._release_copy_sources(step)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, in whatever state it is, and free all that it holds."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
            self._full_at = None  # it may have been the next to start
        else:
            self.running.remove(sequence)
            self.in_flight.leave(sequence)
        if sequence.reservation is not None:
            self.leases.cancel(sequence.reservation)
        self.tables.release(sequence)

    def drop_lease(self) -> bool:
        """End the lease with the least time left before its deadline; false when there is none."""
        self._full_at = None
        return self.leases.drop_next()

    def count_deferred(self) -> int:
        """Waiting sequences whose leader still computes what they share."""
        deferrals = [sequence.deferral for sequence in self.waiting]
        return sum(d is not None and d.is_pending() for d in deferrals)

    def count_slots(self) -> tuple[int, int]:
        """KV slots that running sequences have, and how many of those are for tokens they have.

        A shared block counts once for each sequence that has it.
        """
        size = self._config.block_size
        num_slots = [len(sequence.blocks) * size for sequence in self.running]
        num_tokens = [sequence.num_tokens for sequence in self.running]
        return sum(num_slots), sum(map(min, num_slots, num_tokens))

    def check_integrity(self) -> None:
        """Assert what must hold between any two steps."""
        self.tables.check_integrity(self.running)
        self.in_flight.check_integrity(self.running)
        assert not any(sequence.blocks for sequence in self.waiting), "a waiting one holds blocks"
        assert all(s.was_admitted for s in (*self.running, *self.waiting.preempted)), "unanswered"
        assert not any(s.was_admitted for s in self.waiting.newcomers()), "a newcomer was admitted"

    # Running sequences

    def _serve_decodes(self, step: Step) -> None:
        """Let running sequences compute their newest token, the longest running first."""
        position = 0
        while position < len(self.running) and step.budget_left > 0:
            sequence = self.running[position]  # whoever is preempted stands behind it
            position += 1
            if sequence.num_uncomputed == 1 and self._make_room(sequence):
                step.add(sequence, 1)

    def _make_room(self, sequence: Sequence) -> bool:
        """Extend a table to all its tokens; false when the sequence itself was preempted."""
        num_missing = self.tables.num_missing(sequence)
        while self.pool.num_free < num_missing:
            if self.leases.give_up():
                continue
            self.pool.note_shortage()
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return False
        if num_missing:
            self.tables.extend(sequence)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Put the youngest running sequence back to the head of the queue, without its blocks."""
        assert self.running.pop() is sequence, "only the youngest is preempted"
        self.in_flight.leave(sequence)
        self.tables.release(sequence)
        sequence.num_preemptions += 1
        self.waiting.preempted.appendleft(sequence)
        self._full_at = None  # another one is the next to start
        self.counts["preemptions_total"] += 1

    def _resume_preempted(self, step: Step) -> None:
        """Give the preempted blocks again, in order, before anybody new gets some."""
        while self.waiting.preempted and step.budget_left > 0 and self._has_seat():
            sequence = self.waiting.preempted[0]
            match = self._fit(sequence, self.tables.match(sequence))
            if match is None:
                break
            self.waiting.preempted.popleft()
            match = self.tables.restore(sequence, match)
            sequence.tokens_recomputed_preemption += max(0, sequence.computed - match.tokens)
            self._start(sequence, match, step)

    # Prompts

    def _serve_prompts(self, step: Step, now_ms: int) -> None:
        """Spend what is left of the budget on prompts, in the turns of their namespaces."""
        served = {sequence for sequence, _ in step.scheduled}
        prompts: dict[bytes, deque[Sequence]] = {}
        for sequence in self.running:
            if sequence not in served:
                prompts.setdefault(sequence.request.namespace, deque()).append(sequence)
        order = self._turns.order([*prompts, *self.waiting.namespaces()])
        while order and step.budget_left > 0:
            namespace = order[0]
            num_new = self._serve_prompt(namespace, prompts.get(namespace), step, now_ms)
            if num_new == 0:
                order.popleft()
            elif self._turns.charge(namespace, num_new):
                order.rotate(-1)

    def _serve_prompt(
        self, namespace: bytes, running: deque[Sequence] | None, step: Step, now_ms: int
    ) -> int:
        """Serve a namespace's next prompt, one that runs before a new one; how many tokens."""
        sequence = running.popleft() if running else self._admit_next(namespace, step, now_ms)
        if sequence is None:
            return 0
        num_new = self._afford(step, sequence.tokens_to_next_cut())
        if num_new:
            step.add(sequence, num_new)
        return num_new

    def _afford(self, step: Step, num_wanted: int) -> int:
        """How many of the wanted tokens the step's budget allows; none ends the step."""
        if num_wanted <= step.budget_left:
            return num_wanted
        if self._config.enable_chunked_prefill:
            return step.budget_left
        if not step.has_prompt():
            return num_wanted
        # It may be longer than any budget, so it waits until it is its step's only prompt.
        step.budget_left = 0
        return 0

    # Admission

    def _admit_next(self, namespace: bytes, step: Step, now_ms: int) -> Sequence | None:
        """Start a namespace's next newcomer. While it does not fit, nobody else starts."""
        step.is_open = step.is_open and self._has_seat() and self._batch_left > 0
        if not step.is_open or (newcomer := self._next_newcomer(namespace, now_ms)) is None:
            return None
        sequence, match = newcomer
        if (fitting := self._fit(sequence, match)) is None:
            step.is_open = False
            return None
        if self._afford(step, sequence.num_tokens - fitting.tokens) == 0:
            return None
        self.waiting.remove(sequence)
        fitting = self.tables.restore(sequence, fitting)
        self._start(sequence, fitting, step)
        self.tables.answer(sequence, fitting, now_ms)
        step.admitted.append(sequence)
        self._batch_left -= 1
        return sequence

    def _next_newcomer(self, namespace: bytes, now_ms: int) -> tuple[Sequence, Match] | None:
        """The first one that has no prefix in flight to wait for, and what it can reuse."""
        for sequence in self.waiting.newcomers_of(namespace):
            if sequence.is_deferred(now_ms):
                continue
            match = self.tables.match(sequence)
            is_first = sequence.deferral is None
            if not self.in_flight.defer(sequence, match.tokens, now_ms):
                return sequence, match
            self.counts["deferrals_total"] += is_first
        return None

    def _start(self, sequence: Sequence, match: Match, step: Step) -> None:
        """Let a sequence run in its blocks."""
        if (copy := self.tables.attach(sequence, match)) is not None:
            step.copies.append(copy)
            step.filled.append(sequence)
        if (load := self.tables.load(sequence, match)) is not None:
            step.loads.append(load)
            step.filled.append(sequence)
            step.restored.append((sequence, match))
        sequence.deferral = None
        self.running.append(sequence)
        self.in_flight.advance(sequence)

    def _fit(self, sequence: Sequence, match: Match) -> Match | None:
        """What of the match can be used if the sequence starts now; None: it does not fit."""
        fitting = self.tables.fit(sequence, match, room=self._room())
        if fitting is None:
            most = self._room() + self.leases.count_given_up()
            if self.tables.fit(sequence, match, room=most) is not None:
                while fitting is None and self.leases.give_up():
                    fitting = self.tables.fit(sequence, match, room=self._room())
        if fitting is None:
            self.pool.note_shortage()
        self._full_at = self._room() if fitting is None else None
        return fitting

    def _room(self) -> int:
        """Blocks that one who starts may take.

        One for each running sequence stays free, so that nobody starts only to be preempted at the
        next block boundary.
        """
        num_growing = len(self.running) if self._config.kv_layout == "paged" else 0
        return self.pool.num_free - num_growing

    def _has_new_room(self) -> bool:
        """Whether there is more room than when the last one did not fit, so that it may now."""
        return self._full_at is None or not self.running or self._room() > self._full_at

    def _has_seat(self) -> bool:
        return len(self.running) < self._config.max_num_seqs

    # After a step

    def _count_occupancy(self, step: Step) -> None:
        """Sum up over steps what averages are made of."""
        num_reserved, num_live = self.count_slots()
        self.counts["step_rows_total"] += len(step.rows)
        self.counts["step_kv_slots_reserved_total"] += num_reserved
        self.counts["step_kv_slots_live_total"] += num_live

    def _release_copy_sources(self, step: Step) -> None:
        self.pool.release([copy.source for copy in step.copies])
