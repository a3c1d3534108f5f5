"""The engine core: requests in, events out, one synchronous step at a time.

    step()   expire leases -> end requests that were aborted, finished or queued too long
             -> schedule -> journal admissions -> runner.execute
             -> index new blocks, commit breakpoints -> emit tokens -> end complete requests

Single-threaded, without a clock, and without I/O except the journal's. A block can be reused by
other requests only after the runner has returned from the step that computed it.
"""

import logging
from collections.abc import Mapping
from collections.abc import Sequence as Items
from itertools import islice, takewhile
from typing import Literal

from engine.config import EngineConfig
from engine.journal.sink import JournalSink
from engine.plan import Runner
from engine.protocol import (
    Admitted,
    Committed,
    Event,
    Finished,
    FinishReason,
    GenerateRequest,
    LeaseReport,
    Rejected,
    Tokens,
)
from engine.scheduling.limits import clamp_max_tokens, find_fault
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from engine.scheduling.step import Step
from engine.step_runner import StepRunner
from engine.tiers.lease_store import LeaseStore

log = logging.getLogger(__name__)

COUNTERS = (
    "steps_total",
    "steps_failed_total",
    "rows_failed_total",
    "requests_not_finite_total",
    "steps_stalled_total",
    "step_rows_total",
    "step_kv_slots_reserved_total",
    "step_kv_slots_live_total",
    "tokens_computed_total",
    "tokens_output_total",
    "preemptions_total",
    "displacements_total",
    "deferrals_total",
    "prefix_tokens_queried_total",
    "prefix_tokens_reused_total",
    "prefix_tokens_lease_read_total",
    "lease_granted_total",
    "lease_refreshed_total",
    "lease_refused_total",
)


class EngineCore:
    """All requests of one engine, from submit to their last event."""

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        *,
        boot_id: str,
        journal: JournalSink,
        store: LeaseStore | None = None,
    ) -> None:
        """Start idle, with an empty KV pool and the leases that `store` kept through a restart."""
        assert 0 <= config.pin_cap_blocks < config.num_blocks, "the pin cap must leave blocks"
        self._config = config
        self._journal = journal
        self.scheduler = Scheduler(config, boot_id=boot_id, store=store or LeaseStore())
        self.leases = self.scheduler.tables.leases
        self._step_runner = StepRunner(runner, self.scheduler.counts)
        self._live: dict[str, Sequence] = {}
        self._reports: list[LeaseReport] = []
        # Requests that the client ended, with the number of output tokens to keep (None: all).
        self._endings: dict[str, tuple[FinishReason, int | None]] = {}
        self._pushed_out: list[Rejected] = []  # the next step returns them

    def submit(self, request: GenerateRequest, now_ms: int) -> Rejected | None:
        """Queue a request; returns the reason if it is rejected.

        In a full queue the last newcomer of the namespace that has most of them makes room, if that
        has more than this request's namespace; the next step returns its Rejected event.
        """
        if request.request_id in self._live:
            return Rejected(request.request_id, "invalid_request", "The request id is in use")
        if (fault := find_fault(request, self._config)) is not None:
            return fault
        if len(self.scheduler.waiting) >= self._config.max_queue and not self._push_one_out(
            request
        ):
            return Rejected(request.request_id, "overloaded", "The queue is full")
        max_tokens = clamp_max_tokens(request, self._config)
        sequence = Sequence(request, self._config, max_tokens=max_tokens, submitted_ms=now_ms)
        self._live[request.request_id] = sequence
        self.scheduler.waiting.add(sequence)
        return None

    def abort(self, request_id: str) -> None:
        """End a request in the next step, which returns its Finished event. Idempotent."""
        if request_id in self._live:
            self._endings.setdefault(request_id, ("aborted", None))

    def finish(self, request_id: str, output_tokens: int) -> None:
        """End a request in the next step, keeping its first `output_tokens` output tokens."""
        if request_id in self._live:
            self._endings.setdefault(request_id, ("finished", output_tokens))

    def step(self, now_ms: int) -> list[Event]:
        """Execute one step and return its events in order. Without work it only expires leases."""
        self.leases.expire(now_ms)
        events: list[Event] = [*self._pushed_out, *self._end_requested()]
        self._pushed_out.clear()
        events += self._reject_overdue(now_ms)
        step = self.scheduler.schedule(now_ms)
        for sequence in step.admitted:
            record = sequence.admission_record()
            self._journal.admitted(record)
            num_reused = record.tokens_reused_promised + record.tokens_reused_gift
            events.append(Admitted(sequence.request_id, record.grants, num_reused))
        if step.rows:
            events += self._execute(step)
        elif self._live:
            events += self._drop_a_lease_on_stall()
        if not self._live:
            self.scheduler.idle()
        self._journal_reports()
        return events

    def end_leases(
        self, *, lease_ids: Items[str] = (), namespaces: Items[bytes] = (), now_ms: int
    ) -> int:
        """End leases by id and by namespace, in every tier; returns how many."""
        num_ended = self.leases.end(lease_ids=lease_ids, namespaces=namespaces, now_ms=now_ms)
        self._journal_reports()
        return num_ended

    def stop(self, now_ms: int) -> None:
        """Report the cost of every live lease, before the engine ends."""
        self.leases.report_all(now_ms)
        self._journal_reports()

    def take_reports(self) -> list[LeaseReport]:
        """Return the lease reports since the last call; they are in the journal already."""
        reports, self._reports = self._reports, []
        return reports

    @property
    def has_work(self) -> bool:
        """Whether a step would do more than expire leases."""
        return bool(self._live or self._pushed_out)

    def next_expiry_ms(self) -> int | None:
        """Return when a lease expires or the oldest newcomer is overdue, whichever is first."""
        times = [self.leases.next_expiry_ms()]
        times += [self._overdue_ms(s) for s in islice(self.scheduler.waiting.newcomers(), 1)]
        return min((time_ms for time_ms in times if time_ms is not None), default=None)

    def state_of(self, request_id: str) -> Literal["waiting", "running"] | None:
        """Return the state of a live request; a preempted one is waiting again."""
        sequence = self._live.get(request_id)
        if sequence is None:
            return None
        return "waiting" if sequence in self.scheduler.waiting else "running"

    def stats(self) -> dict[str, float]:
        """Return gauges and counters by metric name."""
        pool, leases = self.scheduler.tables.pool, self.leases
        num_evictable = pool.num_evictable
        num_reserved, num_live = self.scheduler.count_slots()
        gauges: dict[str, float] = {
            "num_requests_running": len(self.scheduler.running),
            "num_requests_waiting": len(self.scheduler.waiting),
            "num_requests_deferred": self.scheduler.count_deferred(),
            "kv_blocks_total": pool.num_blocks,
            "kv_blocks_free": pool.num_free - num_evictable,
            "kv_blocks_evictable": num_evictable,
            "kv_blocks_pinned": pool.num_pinned,
            "kv_blocks_reserved": leases.num_held - pool.num_pinned,
            "kv_slots_reserved": num_reserved,
            "kv_slots_live": num_live,
            "leases_live": leases.num_live,
            "kv_bytes_pinned": pool.num_pinned * self._config.block_bytes,
        }
        counters = {name: self.scheduler.counts[name] for name in COUNTERS}
        return gauges | counters | leases.stats()

    def check_integrity(self) -> None:
        """Assert what must hold between two steps. For tests: it scans everything."""
        self.scheduler.check_integrity()
        queued = {*self.scheduler.waiting, *self.scheduler.running}
        assert queued == set(self._live.values()), "a live request is neither queued nor running"

    def _journal_reports(self) -> None:
        for report in self.leases.reports:
            self._journal.reported(report)
        self._reports += self.leases.reports
        self.leases.reports = []

    def _push_one_out(self, request: GenerateRequest) -> bool:
        """Reject a newcomer in favour of a request; returns whether there is a place now."""
        newcomer = self.scheduler.waiting.to_make_room_for(request.namespace)
        if newcomer is None:
            return False
        self._endings.pop(newcomer.request_id, None)
        self._pushed_out.append(self._reject(newcomer, "The queue is full"))
        return True

    def _end_requested(self) -> list[Event]:
        events: list[Event] = []
        for request_id, (reason, num_kept) in self._endings.items():
            events.append(self._end(self._live[request_id], reason, num_kept=num_kept))
        self._endings.clear()
        return events

    def _reject_overdue(self, now_ms: int) -> list[Event]:
        """Reject newcomers that waited too long; the queue has the oldest first."""
        newcomers = self.scheduler.waiting.newcomers()
        overdue = list(takewhile(lambda s: now_ms >= self._overdue_ms(s), newcomers))
        message = "The request waited too long in the queue"
        return [self._reject(sequence, message) for sequence in overdue]

    def _overdue_ms(self, sequence: Sequence) -> int:
        return sequence.submitted_ms + self._config.max_queue_wait_ms

    def _drop_a_lease_on_stall(self) -> list[Event]:
        """Free blocks after a step that had work and could do none of it.

        The scheduling rules exclude this, so it is a bug. To let other requests go on, each stalled
        step ends the lease with the earliest deadline or, without leases, the oldest request.
        """
        self.scheduler.counts["steps_stalled_total"] += 1
        log.error("step_stalled", extra={"stats": self.stats()})
        if self.scheduler.drop_lease():
            return []
        oldest = next(iter(self._live.values()))
        message = "The engine could not schedule the request"
        if oldest.was_admitted:
            return [self._end(oldest, "error", message=message)]
        return [self._reject(oldest, message)]

    def _execute(self, step: Step) -> list[Event]:
        """Run a step, commit what it computed and end the sequences that it could not compute.

        Raises DeviceLost or StepsFailing: nothing can be computed any more.
        """
        self.scheduler.counts["steps_total"] += 1
        result = self._step_runner.run(step)
        step.leave_out(result.failed)
        events = [*self._commit(step), *self._emit(step, result.sampled)]
        for sequence, reason in result.failed.items():
            events.append(self._end(sequence, "error", message=reason))
        return events

    def _commit(self, step: Step) -> list[Event]:
        events: list[Event] = []
        for sequence, tokens in self.scheduler.commit(step):
            self._journal.committed(sequence.request_id, tokens)
            events.append(Committed(sequence.request_id, tokens))
        return events

    def _emit(self, step: Step, sampled: Mapping[Sequence, int]) -> list[Event]:
        """Append the sampled tokens to their sequences and end those that are complete."""
        events: list[Event] = []
        for (sequence, num_new), row in zip(step.scheduled, step.rows, strict=True):
            self.scheduler.counts["tokens_computed_total"] += num_new
            if row.samples:
                token = sampled[sequence]
                sequence.append(token)
                self._journal.produced(sequence.request_id, sequence.num_output)
                events.append(Tokens(sequence.request_id, (token,)))
            if (reason := _completion(sequence, has_sampled=row.samples)) is not None:
                events.append(self._end(sequence, reason))
        self.scheduler.counts["tokens_output_total"] += len(sampled)
        return events

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        *,
        num_kept: int | None = None,
        message: str | None = None,
    ) -> Finished:
        """Free a sequence and close its record, if it was admitted."""
        self._forget(sequence)
        if not sequence.was_admitted:
            return Finished(sequence.request_id, reason, None, message)
        num_output = sequence.num_output
        kept = num_output if num_kept is None else max(0, min(num_kept, num_output))
        record = sequence.final_record(reason, kept)
        self._journal.finished(record)
        return Finished(sequence.request_id, reason, record, message)

    def _reject(self, newcomer: Sequence, message: str) -> Rejected:
        self._forget(newcomer)
        return Rejected(newcomer.request_id, "overloaded", message)

    def _forget(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        del self._live[sequence.request_id]


def _completion(sequence: Sequence, *, has_sampled: bool) -> FinishReason | None:
    """Return why a sequence that was just served is complete; None: it goes on."""
    if has_sampled and sequence.is_stopped():
        return "stop_token"
    if sequence.num_output == sequence.max_tokens and sequence.num_computed >= sequence.num_prompt:
        return "max_tokens"
    return None
