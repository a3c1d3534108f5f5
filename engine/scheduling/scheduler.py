"""The scheduler: which sequences compute how many tokens in the next step.

Prefill and decode share each step: one token budget goes first to sequences that decode, then to
prompts, in the turns of their namespaces, running prompts before waiting ones. Two rules keep it
live: a waiting sequence holds no block except through its reservation, and when blocks run out the
youngest running sequence is preempted.
"""

from collections import Counter, deque

from engine.blocks.prefix_index import Match
from engine.config import EngineConfig
from engine.scheduling.block_tables import BlockTables
from engine.scheduling.pending_prefixes import PendingPrefixes
from engine.scheduling.policy import choose_policy
from engine.scheduling.sequence import Sequence
from engine.scheduling.step import Step
from engine.scheduling.turns import Turns
from engine.scheduling.waiting_queue import WaitingQueue
from engine.tiers.lease_store import LeaseStore


class Scheduler:
    """The waiting queue and the running sequences."""

    def __init__(self, config: EngineConfig, *, boot_id: str, store: LeaseStore) -> None:
        """Start idle; `boot_id` goes into the records that admission freezes."""
        self._config = config
        self.counts: Counter[str] = Counter()
        policy = choose_policy(config)
        self._batching = policy.batching
        self.tables = BlockTables(config, policy.layout, self.counts, boot_id=boot_id, store=store)
        self.pending_prefixes = PendingPrefixes(config, is_on=self._batching.allows_deferral)
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []  # by first admission; every preempted one is younger
        self._turns = Turns(config.max_num_batched_tokens)
        # Free blocks when the head of the queue last failed to fit; None: it did not fail.
        self._blocks_free_at_last_refusal: int | None = None

    def schedule(self, now_ms: int) -> Step:
        """Plan the next step and allocate its blocks."""
        step = Step(budget_left=self._config.max_num_batched_tokens)
        self._batching.begin_step(is_batch_open=bool(self.running or self.waiting.preempted))
        num_preempted = self.counts["preemptions_total"]
        self._serve_decodes(step)
        if self.counts["preemptions_total"] == num_preempted and self._has_more_free_blocks():
            self._resume_preempted(step)
            step.is_admitting = not self.waiting.preempted
        self._serve_prompts(step, now_ms)
        self._batching.end_step(is_full=step.is_full)
        return step

    def commit(self, step: Step) -> list[tuple[Sequence, int]]:
        """Publish what an executed step computed.

        Returns the breakpoints that became leases, as (sequence, prefix length).
        """
        self.tables.release_copy_sources(step.copies)
        self._count_occupancy(step)
        for sequence, match in step.restored:
            self.tables.publish_restored(sequence, match)
        committed = []
        for sequence, num_new in step.scheduled:
            committed += [(sequence, n) for n in self.tables.commit(sequence, num_new)]
            if sequence in self.pending_prefixes:
                self.pending_prefixes.advance(sequence)
        return committed

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence in any state and free all that it holds."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
            self._blocks_free_at_last_refusal = None  # it may have been the head of the queue
        else:
            self.running.remove(sequence)
            self.pending_prefixes.leave(sequence)
        self.tables.end(sequence)

    def drop_lease(self) -> bool:
        """End the lease with the earliest deadline; returns false when there is none."""
        self._blocks_free_at_last_refusal = None
        return self.tables.leases.drop_next()

    def count_deferred(self) -> int:
        """Return how many waiting sequences have a leader that still computes what they share."""
        deferrals = [sequence.deferral for sequence in self.waiting]
        return sum(d is not None and d.is_pending() for d in deferrals)

    def count_slots(self) -> tuple[int, int]:
        """Return the KV slots of all running sequences, and how many of them have a token.

        A shared block counts once for each sequence that has it.
        """
        size = self._config.block_size
        num_slots = [len(sequence.blocks) * size for sequence in self.running]
        num_tokens = [sequence.num_tokens for sequence in self.running]
        return sum(num_slots), sum(map(min, num_slots, num_tokens))

    def check_integrity(self) -> None:
        """Assert what must hold between any two steps."""
        self.tables.check_integrity(self.running)
        self.pending_prefixes.check_integrity(self.running)
        assert not any(sequence.blocks for sequence in self.waiting), "a waiting one holds blocks"
        assert all(s.was_admitted for s in (*self.running, *self.waiting.preempted)), "unanswered"
        assert not any(s.was_admitted for s in self.waiting.newcomers()), "a newcomer was admitted"

    # Running sequences

    def _serve_decodes(self, step: Step) -> None:
        """Schedule one token for each sequence that decodes, oldest first."""
        position = 0
        while position < len(self.running) and not step.is_full:
            sequence = self.running[position]
            position += 1  # only sequences from here on can be preempted below
            if sequence.num_uncomputed == 1 and self._extend_or_preempt(sequence):
                step.add(sequence, 1)

    def _extend_or_preempt(self, sequence: Sequence) -> bool:
        """Allocate the blocks that a running sequence lacks, preempting younger ones for them.

        Returns false when the sequence itself was the youngest and is preempted.
        """
        while not self.tables.extend(sequence):
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Free the youngest running sequence's blocks and put it at the head of the queue."""
        assert self.running.pop() is sequence, "only the youngest is preempted"
        self.pending_prefixes.leave(sequence)
        self.tables.release(sequence)
        sequence.num_preemptions += 1
        self.waiting.preempted.appendleft(sequence)
        self._blocks_free_at_last_refusal = None  # the head of the queue is another one now
        self.counts["preemptions_total"] += 1

    def _resume_preempted(self, step: Step) -> None:
        """Start preempted sequences again, in order, as far as they fit."""
        while self.waiting.preempted and not step.is_full and self._has_running_slot():
            sequence = self.waiting.preempted[0]
            match = self._fit(sequence, self.tables.match(sequence))
            if match is None:
                break
            self.waiting.preempted.popleft()
            num_computed = sequence.num_computed
            match = self._start(sequence, match, step)
            sequence.tokens_recomputed_preemption += max(0, num_computed - match.num_tokens)

    # Prompts

    def _serve_prompts(self, step: Step, now_ms: int) -> None:
        """Spend the rest of the budget on prompts, in the turns of their namespaces."""
        served = {sequence for sequence, _ in step.scheduled}
        prompts: dict[bytes, deque[Sequence]] = {}
        for sequence in self.running:
            if sequence not in served:
                prompts.setdefault(sequence.request.namespace, deque()).append(sequence)
        order = self._turns.order([*prompts, *self.waiting.namespaces()])
        while order and not step.is_full:
            namespace = order[0]
            running = prompts.get(namespace)
            candidate = running.popleft() if running else self._admit_next(namespace, step, now_ms)
            if candidate is None:
                order.popleft()
                continue
            num_new = self._cut_to_budget(step, candidate.tokens_to_next_cut())
            if num_new == 0:
                step.is_full = True
                break
            step.add(candidate, num_new)
            if self._turns.charge(namespace, num_new):
                order.rotate(-1)

    def _cut_to_budget(self, step: Step, num_wanted: int) -> int:
        """Return how many of a prompt's tokens the step can compute; 0: it needs another step."""
        if num_wanted <= step.budget_left:
            return num_wanted
        if self._config.enable_chunked_prefill:
            return step.budget_left
        # A whole prompt may exceed every budget, so it waits until it is its step's only prompt.
        return 0 if step.has_prompt() else num_wanted

    # Admission

    def _admit_next(self, namespace: bytes, step: Step, now_ms: int) -> Sequence | None:
        """Admit the next waiting sequence of a namespace.

        If it does not fit, nothing more is admitted in this step; if it exceeds the budget, the
        step is full.
        """
        if not (step.is_admitting and self._has_running_slot() and self._batching.may_admit()):
            return None
        if (newcomer := self._next_newcomer(namespace, now_ms)) is None:
            return None
        sequence, match = newcomer
        if (fitting := self._fit(sequence, match)) is None:
            step.is_admitting = False
            return None
        if self._cut_to_budget(step, sequence.num_tokens - fitting.num_tokens) == 0:
            step.is_full = True
            return None
        self.waiting.remove(sequence)
        match = self._start(sequence, fitting, step)
        self.tables.admit(sequence, match, now_ms)
        step.admitted.append(sequence)
        self._batching.count_admission()
        return sequence

    def _next_newcomer(self, namespace: bytes, now_ms: int) -> tuple[Sequence, Match] | None:
        """Return the first sequence that need not be deferred, and what it can reuse."""
        for sequence in self.waiting.newcomers_of(namespace):
            if sequence.is_deferred(now_ms):
                continue
            match = self.tables.match(sequence)
            is_first = sequence.deferral is None
            if not self.pending_prefixes.defer(sequence, match.num_tokens, now_ms):
                return sequence, match
            self.counts["deferrals_total"] += is_first
        return None

    def _start(self, sequence: Sequence, match: Match, step: Step) -> Match:
        """Allocate a sequence's blocks and run it; returns what it reuses, restored tokens too."""
        match = self.tables.restore(sequence, match)
        if (copy := self.tables.attach(sequence, match)) is not None:
            step.copies.append(copy)
            step.filled.append(sequence)
        if (load := self.tables.load(sequence, match)) is not None:
            step.loads.append(load)
            step.filled.append(sequence)
            step.restored.append((sequence, match))
        sequence.deferral = None
        self.running.append(sequence)
        self.pending_prefixes.advance(sequence)
        return match

    def _fit(self, sequence: Sequence, match: Match) -> Match | None:
        """Return what a sequence can use of its match if it starts now; None: it does not fit."""
        num_running = len(self.running)
        fitting = self.tables.fit(sequence, match, num_running=num_running)
        num_free = self.tables.num_free_to_start(num_running)
        self._blocks_free_at_last_refusal = num_free if fitting is None else None
        return fitting

    def _has_more_free_blocks(self) -> bool:
        """Return whether the head of the queue may fit now, if it failed to fit last time."""
        at_refusal, num_running = self._blocks_free_at_last_refusal, len(self.running)
        if at_refusal is None or num_running == 0:
            return True
        return self.tables.num_free_to_start(num_running) > at_refusal

    def _has_running_slot(self) -> bool:
        return len(self.running) < self._config.max_num_seqs

    def _count_occupancy(self, step: Step) -> None:
        """Add a step to the sums from which average occupancy and KV waste are calculated."""
        num_reserved, num_live = self.count_slots()
        self.counts["step_rows_total"] += len(step.rows)
        self.counts["step_kv_slots_reserved_total"] += num_reserved
        self.counts["step_kv_slots_live_total"] += num_live
