"""The scheduler against an oracle that knows what every KV slot should hold."""

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from engine.blocks.prefix_index import TOKEN_DTYPE, PrefixChain
from engine.lease_types import owner_of
from engine.protocol import Admitted, Committed, Finished, Rejected, Tokens
from engine.tiers.lease_store import LeaseStore
from tests.engine.oracle import Bench, OracleRunner, random_config, random_requests, unpack
from tests.engine.slot_tier import SlotTier, slot_store

NUM_REQUESTS = 40
MAX_STEPS = 3_000


class Promises:
    """What leases the core has promised, by prefix, until when: a model with no blocks in it."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.store = LeaseStore()
        self.deadlines: dict[tuple[bytes, bytes], int] = {}

    def extend(self, request, tokens: int, submitted_ms: int, *, is_new: bool) -> None:
        prefix = (request.namespace, request.prompt_token_ids[: tokens * 4])
        (ttl_ms,) = [b.ttl_ms for b in request.breakpoints if b.num_tokens == tokens]
        deadline_ms = submitted_ms + ttl_ms + self.bench.config.lease_grace_ms
        assert is_new or prefix in self.deadlines, f"refreshed a lease that is not: {prefix}"
        self.deadlines[prefix] = max(self.deadlines.get(prefix, 0), deadline_ms)

    def end(self, namespace: bytes, prompt: bytes) -> None:
        del self.deadlines[namespace, prompt]

    def keep_only(self, stored: set[tuple[bytes, bytes]]) -> None:
        """After a restart: what the disk has, by owner and tokens."""
        self.deadlines = {
            (namespace, prompt): deadline_ms
            for (namespace, prompt), deadline_ms in self.deadlines.items()
            if (owner_of(namespace), prompt) in stored
        }

    def expire(self) -> None:
        now_ms = self.bench.now_ms
        self.deadlines = {p: d for p, d in self.deadlines.items() if d > now_ms}

    def check_one(self, chance: random.Random) -> None:
        """Any live lease can be read in full by a longer prompt."""
        if not self.deadlines:
            return
        namespace, prompt = chance.choice(list(self.deadlines))
        tokens = np.array([*unpack(prompt), 0], dtype=TOKEN_DTYPE)
        chain = PrefixChain(namespace, tokens, self.bench.config.block_size)
        match = self.bench.core.scheduler.tables.index.match(chain, len(tokens))
        stored = self.store.find(chain, len(tokens), matched=match.num_tokens)
        longest = {chain.at(length).key for length in (len(tokens) - 1, len(tokens))}
        is_whole = match.num_tokens == len(tokens) - 1 or stored in longest
        assert is_whole, f"a live lease is not readable: {match}"


class Meter:
    """The integral of distinct leased blocks over time, to compare with what leases report."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.block_ms = 0

    def pass_time(self, ms: int) -> None:
        self.block_ms += ms * self.bench.core.leases.meter.num_leased_blocks()

    def check(self) -> None:
        totals: dict[str, int] = {}
        for report in self.bench.journal.reports:
            total = report.idle_block_ms + report.contended_block_ms
            totals[report.lease_id] = max(total, totals.get(report.lease_id, 0))
        assert sum(totals.values()) == self.block_ms, "reports do not add up to what was pinned"


class Scenario:
    """One random run; every event is checked as it comes."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        config = random_config(self.chance)
        self.tier = SlotTier(
            keeps_all=self.chance.random() < 0.5,
            budget_bytes=self.chance.choice([8, 1 << 30, 1 << 30]),
            chance=random.Random(seed),
        )
        self.host_chance = random.Random(f"host {seed}")
        self.has_host = self.host_chance.random() < 0.4
        self.bench = Bench(
            config, store=self.open_store, num_tokens_sampled=self.chance.choice([40, 1000])
        )
        requests = random_requests(self.chance, config, num_requests=NUM_REQUESTS)
        self.unsent = requests[::-1]
        self.requests = {request.request_id: request for request in requests}
        self.order: dict[str, int] = {}
        self.submitted_ms: dict[str, int] = {}
        self.live: list[str] = []
        self.output: dict[str, list[int]] = {}
        self.commits: dict[str, list[int]] = {}
        self.admissions: dict[str, Admitted] = {}
        self.ends: dict[str, Finished | Rejected] = {}
        self.promises = Promises(self.bench)
        self.promises.store = self.store
        self.meter = Meter(self.bench)
        self.num_reports = 0
        self.restarts_at = self.chance.choice([None, self.chance.randrange(20, 120)])
        self.has_failures = self.chance.random() < 0.2
        self.num_broken = 0
        self.breaks_loads = self.chance.random() < 0.5

    def open_store(self, runner: OracleRunner) -> LeaseStore:
        """The disk's tier stays; that of host memory begins empty with each engine."""
        size, chance = self.host_chance.choice([8, 1 << 30]), self.host_chance
        host = SlotTier("host", keeps_all=True, budget_bytes=size, chance=chance)
        self.tiers = (host, self.tier) if self.has_host else (self.tier,)
        self.store = slot_store(runner, *self.tiers)
        return self.store

    def run(self) -> None:
        for number in range(MAX_STEPS):
            if not (self.unsent or self.bench.core.has_work):
                break
            self.disturb()
            if number == self.restarts_at:
                self.restart()
            for event in self.step():
                self.take(event)
            self.promises.check_one(self.chance)
            assert self.bench.core.stats()["leases_live"] == len(self.promises.deadlines)
        else:
            raise AssertionError(f"hangs: {self.bench.core.stats()}")
        assert self.ends.keys() == self.requests.keys()
        self.meter.pass_time(100_000)
        self.bench.step(advance_ms=100_000)
        self.meter.check()
        assert not any(tier.kept for tier in self.tiers), "an ended lease is still stored"
        stats = self.bench.core.stats()
        assert stats["kv_blocks_pinned"] == stats["kv_blocks_reserved"] == stats["leases_live"] == 0
        assert stats["num_requests_deferred"] == stats["kv_slots_reserved"] == 0
        assert stats["kv_blocks_free"] + stats["kv_blocks_evictable"] == stats["kv_blocks_total"]

    def disturb(self) -> None:
        """Submit some, end some, break the runner now and then."""
        while self.unsent and self.chance.random() < 0.4:
            request = self.unsent.pop()
            self.submitted_ms[request.request_id] = self.bench.now_ms
            self.order[request.request_id] = len(self.order)
            rejected = self.bench.submit(request)
            if rejected is not None:
                self.ends[request.request_id] = rejected
            else:
                self.live.append(request.request_id)
        if self.live and self.chance.random() < 0.03:
            self.bench.core.abort(self.chance.choice(self.live))
        if self.live and self.chance.random() < 0.03:
            request_id = self.chance.choice(self.live)
            num_kept = self.chance.randint(0, 1 + len(self.output.get(request_id, ())))
            self.bench.core.finish(request_id, num_kept)
        self.break_something()

        if self.chance.random() < 0.03:
            self.unpin()
        if self.chance.random() < 0.1:  # as if blocks were short
            self.bench.core.leases.unpin_spilled()

    def break_something(self) -> None:
        """Choose what the runner cannot compute in the next step; now and then it can do all."""
        runner, self.num_broken = self.bench.runner, (self.num_broken + 1) % 4
        may_break = self.num_broken > 0
        runner.fails = may_break and self.has_failures and self.chance.random() < 0.02
        runner.fails_loading = may_break and self.breaks_loads and self.chance.random() < 0.5
        for broken in (runner.failing, runner.not_finite):
            broken.clear()
            if may_break and self.has_failures and self.live and self.chance.random() < 0.02:
                broken.add(self.chance.choice(self.live))

    def unpin(self) -> None:
        """End some lease by id or all of a namespace, also what ended before."""
        ids = [report.lease_id for report in self.bench.journal.reports]
        is_by_id = ids and self.chance.random() < 0.7
        self.bench.core.end_leases(
            lease_ids=[self.chance.choice(ids)] if is_by_id else [],
            namespaces=[] if is_by_id else [self.chance.choice([b"tenant-a", b"nobody"])],
            now_ms=self.bench.now_ms,
        )
        self.take_reports()
        self.bench.core.check_integrity()

    def restart(self) -> None:
        """The engine is gone; the next one has what the disk has, and no request."""
        self.bench.core.stop(self.bench.now_ms)
        self.ends |= dict.fromkeys(self.live)
        self.live.clear()
        self.bench.boot()
        self.promises.store = self.store
        stored = [kept[0] for kept in self.tier.kept.values()]
        kept = {(prefix.owner, prefix.token_ids) for prefix in stored}
        self.promises.keep_only(kept)

    def step(self):
        advance_ms = 900 if self.chance.random() < 0.02 else self.chance.randint(0, 12)
        self.meter.pass_time(advance_ms)
        self.bench.now_ms += advance_ms
        self.promises.expire()
        events = self.bench.step(advance_ms=0)
        self.lost_now = self.take_reports()
        self.check_slots([e.request_id for e in events if isinstance(e, Admitted)])
        return events

    def check_slots(self, admitted: list[str]) -> None:
        """None was admitted beyond its namespace's share while one without any slot waits."""
        scheduler = self.bench.core.scheduler
        running = Counter(sequence.request.namespace for sequence in scheduler.running)
        num_slots = self.bench.config.max_num_seqs
        waiting = scheduler.waiting.namespaces()
        share = max(1, num_slots // max(1, len({*running, *waiting})))
        if running.total() == num_slots and not all(running[each] for each in waiting):
            takers = {self.requests[request_id].namespace for request_id in admitted}
            assert all(running[each] <= share for each in takers), f"more than a share: {running}"

    def take_reports(self) -> set[str]:
        """Forget the promises that were ended or lost; return the ids of their leases."""
        reports = self.bench.journal.reports[self.num_reports :]
        self.num_reports += len(reports)
        ended = [report for report in reports if report.reason in ("lost", "unpinned")]
        for report in ended:
            request = self.requests[report.request_id]
            self.promises.end(request.namespace, request.prompt_token_ids[: report.num_tokens * 4])
        return {report.lease_id for report in ended}

    def take(self, event) -> None:
        request_id = event.request_id
        request = self.requests[request_id]
        assert request_id not in self.ends, f"an event after the end: {event}"
        if isinstance(event, Admitted):
            self.take_admission(event)
        elif isinstance(event, Committed):
            (grant,) = [
                g for g in self.admissions[request_id].grants if g.num_tokens == event.num_tokens
            ]
            assert grant.outcome != "refused"
            if grant.outcome == "granted":
                submitted_ms = self.submitted_ms[request_id]
                self.promises.extend(request, event.num_tokens, submitted_ms, is_new=True)
            self.commits.setdefault(request_id, []).append(event.num_tokens)
        elif isinstance(event, Tokens):
            assert request_id in self.admissions
            self.output.setdefault(request_id, []).extend(event.token_ids)
        else:
            self.ends[request_id] = event
            self.live.remove(request_id)
            if isinstance(event, Finished):
                self.take_end(event)
                self.try_again(event)
            else:
                assert event.code == "overloaded"
                assert request_id not in self.admissions

    def try_again(self, event: Finished) -> None:
        """Who failed comes again at once, so that what its step left behind is read."""
        again = replace(self.requests[event.request_id], request_id=f"{event.request_id}_again")
        if event.reason == "error" and not event.request_id.endswith("_again"):
            self.requests[again.request_id] = again
            self.unsent.append(again)

    def take_admission(self, event: Admitted) -> None:
        request = self.requests[event.request_id]
        assert event.request_id not in self.admissions, "admitted twice"
        assert 0 <= event.tokens_reused < request.num_prompt_tokens, "nothing left to compute"
        assert len(event.grants) == len(request.breakpoints)
        self.admissions[event.request_id] = event
        self.check_passed(request)
        for grant in event.grants:
            assert not grant.committed
            if grant.outcome == "refreshed" and grant.lease_id not in self.lost_now:
                submitted_ms = self.submitted_ms[event.request_id]
                self.promises.extend(request, grant.num_tokens, submitted_ms, is_new=False)

    def check_passed(self, request) -> None:
        """Whom an admitted request has passed in its namespace's queue waits for a prefix."""
        for sequence in self.bench.core.scheduler.waiting.newcomers_of(request.namespace):
            is_older = self.order[sequence.request_id] < self.order[request.request_id]
            assert not is_older or sequence.deferral, f"passed: {sequence.request_id}"

    def take_end(self, event: Finished) -> None:
        request_id, record = event.request_id, event.record
        request, output = self.requests[request_id], self.output.get(event.request_id, [])
        assert output == self.bench.runner.continuation(request, len(output)), "wrong output"
        if record is None:
            assert event.reason in ("aborted", "finished")
            assert request_id not in self.admissions
            return
        facts = ("tokens_reused_promised", "tokens_reused_gift")
        facts += ("tokens_read_recomputed", "tokens_computed")
        opened = self.bench.journal.opened[request_id]
        assert [getattr(record, name) for name in facts] == [getattr(opened, n) for n in facts]
        assert sum(getattr(record, name) for name in facts) == request.num_prompt_tokens
        assert min(getattr(record, name) for name in facts) >= 0
        assert record.output_tokens + record.overrun_tokens == len(output)
        committed = [grant.num_tokens for grant in record.grants if grant.committed]
        assert committed == self.commits.get(request_id, [])
        assert committed == self.bench.journal.commits.get(request_id, [])
        assert self.bench.journal.closed[request_id] == record
        if event.reason in ("stop_token", "max_tokens"):
            granted = [grant.num_tokens for grant in record.grants if grant.outcome != "refused"]
            assert committed == granted, "it ended without committing a grant"
            assert event.reason == "max_tokens" or output[-1] in request.stop_token_ids
            assert request.ignore_eos or not set(output[:-1]) & set(request.stop_token_ids)
            assert not request.ignore_eos or event.reason == "max_tokens"


@pytest.mark.parametrize("group", range(30))
def test_random_requests_never_see_foreign_stale_or_uncommitted_kv(group: int) -> None:
    for seed in range(group * 10, group * 10 + 10):
        try:
            Scenario(seed).run()
        except AssertionError as error:
            error.add_note(f"scenario {seed}")
            raise
