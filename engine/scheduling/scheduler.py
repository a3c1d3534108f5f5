"""The scheduler: which sequences compute how many tokens next, and which one is preempted.

Prefill and decode share each step: one token budget goes first to sequences that decode, then to
prompts, in the turns of their namespaces, running prompts before waiting ones. Two rules keep it
live: a waiting sequence holds no block except through its reservation, and when blocks run out the
youngest running sequence is preempted. Two keep it fair: who does not fit is passed for a while
(`bypass.py`), and borrowed running slots are given back (`shares.py`).
"""

from bisect import insort
from collections import Counter, deque

from engine.blocks.prefix_index import Match
from engine.config import EngineConfig
from engine.scheduling.block_tables import BlockTables
from engine.scheduling.bypass import Bypass
from engine.scheduling.pace import Pace
from engine.scheduling.pending_prefixes import PendingPrefixes
from engine.scheduling.policy import choose_policy
from engine.scheduling.sequence import Sequence
from engine.scheduling.shares import Shares
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
        self._bypass = Bypass(config.max_bypass_ms)
        self._pace = Pace(config.step_target_ms)
        self._num_started = 0
        # Free blocks when the first preempted one last failed to fit; None: it did not fail.
        self._blocks_free_at_last_refusal: int | None = None

    def schedule(self, now_ms: int) -> Step:
        """Plan the next step and allocate its blocks.

        While there is work, this is called again as soon as the step has ended: so the time between
        the calls is how long a step takes.
        """
        self._pace.begin(now_ms)
        step = Step(budget_left=self._config.max_num_batched_tokens)
        self._batching.begin_step(is_batch_open=bool(self.running or self.waiting.preempted))
        head = self._bypass.head(now_ms, self._fits_without_others)
        step.admits_only = head.request.namespace if head is not None else None
        if self._batching.may_admit() and not self.waiting.preempted:
            self._displace_borrower(step, now_ms)
        num_preempted = self.counts["preemptions_total"]
        self._serve_decodes(step)
        if self.counts["preemptions_total"] == num_preempted and self._has_more_free_blocks():
            self._resume_preempted(step)
            step.is_admitting = not self.waiting.preempted
        num_decodes, is_alone = len(step.scheduled), not step.scheduled
        step.limit(self._pace.prompt_tokens(is_alone=is_alone, budget=step.budget_left))
        self._serve_prompts(step, now_ms)
        num_prompt_tokens = sum(num_new for _, num_new in step.scheduled[num_decodes:])
        self._pace.end(now_ms, num_prompt_tokens, was_limited=step.is_full)
        self._batching.end_step(is_full=step.is_full)
        return step

    def idle(self) -> None:
        """Note that no work is left: the time until the next step is not this one's."""
        self._pace.idle()

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
            self._bypass.forget(sequence)
            self._blocks_free_at_last_refusal = None  # it may have been the first preempted one
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
        admitted = (*self.running, *self.waiting.preempted, *self.waiting.displaced())
        assert all(sequence.was_admitted for sequence in admitted), "unanswered"
        order = [sequence.start_number for sequence in (*self.running, *self.waiting.preempted)]
        assert order == sorted(order), "an older sequence was preempted before a younger one"
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
        assert self.running[-1] is sequence, "only the youngest is preempted"
        self._stop(sequence)
        self.waiting.preempted.appendleft(sequence)
        self._blocks_free_at_last_refusal = None  # the first preempted one is another one now

    def _displace_borrower(self, step: Step, now_ms: int) -> None:
        """Take a borrowed slot back for a namespace that could start a sequence in it now."""
        if self._has_running_slot():
            return
        shares = self._shares()
        if (borrower := shares.borrower()) is None:
            return
        for namespace in shares.claimants():
            if step.admits_only not in (None, namespace):
                continue
            newcomer = self._next_of(namespace, now_ms)
            if newcomer is not None and self._fit_or_pass(*newcomer, now_ms) is not None:
                self._stop(borrower)
                self.waiting.add_displaced(borrower)
                self.counts["displacements_total"] += 1
                return

    def _stop(self, sequence: Sequence) -> None:
        """Take a sequence out of the running ones and free its blocks."""
        self.running.remove(sequence)
        self.pending_prefixes.leave(sequence)
        self.tables.release(sequence)
        sequence.num_preemptions += 1
        self.counts["preemptions_total"] += 1

    def _resume_preempted(self, step: Step) -> None:
        """Start preempted sequences again, in order, as far as they fit."""
        while self.waiting.preempted and not step.is_full and self._has_running_slot():
            sequence = self.waiting.preempted[0]
            num_running = len(self.running)
            found = self.tables.match(sequence)
            match = self.tables.fit(sequence, found, num_running=num_running)
            if match is None:
                num_free = self.tables.num_free_to_start(num_running)
                self._blocks_free_at_last_refusal = num_free
                break
            self._blocks_free_at_last_refusal = None
            self.waiting.preempted.popleft()
            self._start(sequence, match, step)

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
        """Start the next waiting sequence of a namespace; None: none starts in this step.

        If it exceeds the budget, the step is full.
        """
        if not (step.is_admitting and step.admits_only in (None, namespace)):
            return None
        if not (self._has_running_slot() and self._batching.may_admit()):
            return None
        may_start = self._shares().may_start(namespace)
        if not may_start or (waiting := self._next_of(namespace, now_ms)) is None:
            return None
        sequence, match = waiting
        if (fitting := self._fit_or_pass(sequence, match, now_ms)) is None:
            return None
        if self._cut_to_budget(step, sequence.num_tokens - fitting.num_tokens) == 0:
            step.is_full = True
            return None
        self.waiting.remove(sequence)
        self._bypass.forget(sequence)
        match = self._start(sequence, fitting, step)
        if not sequence.was_admitted:
            self.tables.admit(sequence, match, now_ms)
            step.admitted.append(sequence)
            self._batching.count_admission()
        return sequence

    def _next_of(self, namespace: bytes, now_ms: int) -> tuple[Sequence, Match] | None:
        """Return a namespace's first sequence that may start, and what it can reuse.

        None if there is none, or if it failed to fit and no more blocks are free now.
        """
        if (sequence := self._next_undeferred(namespace, now_ms)) is None:
            return None
        num_running = len(self.running)
        num_free = self.tables.num_free_to_start(num_running)
        if num_running and not self._bypass.may_fit(sequence, num_free):
            return None
        return sequence, self.tables.match(sequence)

    def _next_undeferred(self, namespace: bytes, now_ms: int) -> Sequence | None:
        if (displaced := self.waiting.next_displaced(namespace)) is not None:
            return displaced
        for sequence in self.waiting.newcomers_of(namespace):
            if sequence.is_deferred(now_ms):
                continue
            is_first = sequence.deferral is None
            num_matched = self.tables.match(sequence).num_tokens
            if not self.pending_prefixes.defer(sequence, num_matched, now_ms):
                return sequence
            self.counts["deferrals_total"] += is_first
        return None

    def _start(self, sequence: Sequence, match: Match, step: Step) -> Match:
        """Allocate a sequence's blocks and run it; returns what it reuses, restored tokens too."""
        num_computed = sequence.num_computed  # before it was preempted
        match = self.tables.restore(sequence, match)
        if (copy := self.tables.attach(sequence, match)) is not None:
            step.copies.append(copy)
            step.filled.append(sequence)
        if (load := self.tables.load(sequence, match)) is not None:
            step.loads.append(load)
            step.filled.append(sequence)
            step.restored.append((sequence, match))
        sequence.deferral = None
        if sequence.was_admitted:
            sequence.tokens_recomputed_preemption += max(0, num_computed - match.num_tokens)
        else:
            sequence.start_number = self._num_started
            self._num_started += 1
        insort(self.running, sequence, key=lambda each: each.start_number)
        self.pending_prefixes.advance(sequence)
        return match

    def _fit_or_pass(self, sequence: Sequence, match: Match, now_ms: int) -> Match | None:
        """Return what a sequence can use of its match if it starts now; None: others pass it."""
        num_running = len(self.running)
        fitting = self.tables.fit(sequence, match, num_running=num_running)
        if fitting is None:
            num_free = self.tables.num_free_to_start(num_running)
            self._bypass.refuse(sequence, num_free, now_ms)
        return fitting

    def _fits_without_others(self, sequence: Sequence) -> bool:
        """Return whether a sequence would fit if no other namespace had running sequences."""
        namespace = sequence.request.namespace
        others = [each for each in self.running if each.request.namespace != namespace]
        num_own = len(self.running) - len(others)
        return self.tables.would_fit(sequence, num_running=num_own, after=others)

    def _shares(self) -> Shares:
        num_slots = self._config.max_num_seqs
        return Shares(self.running, self.waiting.namespaces(), num_slots=num_slots)

    def _has_more_free_blocks(self) -> bool:
        """Return whether the first preempted one may fit now, if it failed to fit last time."""
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
