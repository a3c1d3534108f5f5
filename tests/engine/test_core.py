import pytest

from engine.protocol import (
    Admitted,
    Breakpoint,
    Committed,
    Finished,
    Grant,
    Rejected,
    Tokens,
)
from tests.engine.oracle import Bench, ask, small_config


def bench(**changes: object) -> Bench:
    return Bench(small_config(**changes))


def of(events, kind):
    return [event for event in events if isinstance(event, kind)]


def record_of(events):
    (finished,) = of(events, Finished)
    return finished.record


def write(tokens: int, ttl_ms: int = 1_000) -> Breakpoint:
    return Breakpoint(tokens, ttl_ms, write=True)


def read(tokens: int, ttl_ms: int = 1_000) -> Breakpoint:
    return Breakpoint(tokens, ttl_ms, write=False)


def test_a_request_is_admitted_answered_and_finished() -> None:
    here = bench()
    request = ask("r", range(10), max_tokens=2)

    events = here.run(request)

    first, second = here.runner.continuation(request, 2)
    record = record_of(events)
    assert events == [
        Admitted("r", (), 0),
        Tokens("r", (first,)),
        Tokens("r", (second,)),
        Finished("r", "max_tokens", record),
    ]
    assert (record.prompt_tokens, record.tokens_computed, record.output_tokens) == (10, 10, 2)
    assert here.journal.closed["r"] == record
    assert here.journal.opened["r"].output_tokens == 0
    assert not here.core.has_work


@pytest.mark.parametrize(
    ("read_tokens", "facts"),
    [
        (0, (0, 8, 0, 4)),  # no promise, no claim: a gift
        (5, (5, 3, 0, 4)),
        (8, (8, 0, 0, 4)),
        (10, (8, 0, 2, 2)),
        (12, (8, 0, 4, 0)),  # a billed read may be the whole prompt
    ],
)
def test_the_four_facts_split_the_prompt(read_tokens, facts) -> None:
    here = bench()
    here.run(ask("first", range(8), max_tokens=1))

    record = record_of(here.run(ask("r", [*range(8), 9, 9, 9, 9], read_tokens=read_tokens)))

    assert (
        record.tokens_reused_promised,
        record.tokens_reused_gift,
        record.tokens_read_recomputed,
        record.tokens_computed,
    ) == facts
    assert record.reads_by_tier == {"device": 8}


def test_nothing_is_shared_before_the_step_that_computed_it_has_returned() -> None:
    here = bench()
    for name in ("first", "same step"):
        assert here.submit(ask(name, range(9), max_tokens=3)) is None
    assert [a.tokens_reused for a in of(here.step(), Admitted)] == [0, 0]

    here.submit(ask("next step", range(9)))

    assert [a.tokens_reused for a in of(here.step(), Admitted)] == [8]


def test_one_prompt_in_two_namespaces_is_computed_twice() -> None:
    here = bench()
    here.run(ask("first", range(20), namespace=b"tenant-a", breakpoints=(write(16),)))

    events = here.run(ask("r", range(20), namespace=b"tenant-b", breakpoints=(read(16),)))

    assert events[0] == Admitted("r", (Grant(16, False, "granted"),), 0)
    assert here.core.stats()["leases_live"] == 2


def test_output_is_reused_by_a_longer_conversation() -> None:
    here = bench()
    first = ask("first", range(6), max_tokens=7)
    here.run(first)
    output = here.runner.continuation(first, 7)

    events = here.run(ask("second", [*range(6), *output, 1, 2]))

    assert events[0] == Admitted("second", (), 12)


def test_a_stop_token_is_the_last_output_token_and_is_counted() -> None:
    here = bench()
    request = ask("r", range(5), max_tokens=9)
    third = here.runner.continuation(request, 3)[2]

    events = here.run(ask("r", range(5), max_tokens=9, stop_token_ids=(third,)))

    assert of(events, Tokens)[-1].token_ids == (third,)
    assert (events[-1].reason, events[-1].record.output_tokens) == ("stop_token", 3)


def test_max_tokens_zero_computes_the_prompt_and_commits_its_breakpoints() -> None:
    here = bench()

    events = here.run(ask("r", range(10), max_tokens=0, breakpoints=(write(7), write(10))))

    assert of(events, Tokens) == []
    assert [event.num_tokens for event in of(events, Committed)] == [7, 10]
    assert events[-1].reason == "max_tokens"
    assert here.core.stats()["leases_live"] == 2


def test_finish_keeps_the_first_tokens_and_counts_the_rest_as_overrun() -> None:
    here = bench()
    here.submit(ask("r", range(5), max_tokens=50))
    for _ in range(4):
        here.step()

    here.core.finish("r", 3)
    (finished,) = here.step()
    here.core.finish("r", 1)

    assert (finished.reason, finished.record.output_tokens) == ("finished", 3)
    assert finished.record.overrun_tokens == 1
    assert here.step() == []


def test_abort_ends_a_request_in_every_state_and_only_once() -> None:
    here = bench(max_num_seqs=1)
    here.submit(ask("running", range(5), max_tokens=50))
    here.submit(ask("waiting", range(5), max_tokens=50))
    here.step()
    assert here.core.state_of("running") == "running"
    assert here.core.state_of("waiting") == "waiting"

    for name in ("running", "waiting", "running", "unknown"):
        here.core.abort(name)
    running, waiting = here.step()

    assert (running.reason, running.record.output_tokens) == ("aborted", 1)
    assert waiting == Finished("waiting", "aborted", None)
    assert "waiting" not in here.journal.opened
    assert here.core.state_of("running") is None
    assert not here.core.has_work


def test_an_id_is_free_again_when_its_request_has_ended() -> None:
    here = bench()
    here.submit(ask("r", range(5)))
    rejected = here.core.submit(ask("r", range(5)), here.now_ms)
    assert rejected == Rejected("r", "invalid_request", "The request id is in use")
    here.drain()
    del here.journal.opened["r"], here.journal.outputs["r"], here.journal.closed["r"]

    assert here.submit(ask("r", range(5))) is None


def test_a_full_queue_and_a_long_wait_are_answered_overloaded() -> None:
    here = bench(max_queue=2, max_num_seqs=1, max_queue_wait_ms=100)
    here.submit(ask("running", range(5), max_tokens=60))
    here.step()
    for name in ("second", "third"):
        assert here.submit(ask(name, range(5))) is None

    assert here.submit(ask("fourth", range(5))).code == "overloaded"
    assert here.core.next_expiry_ms() == here.now_ms + 100
    assert of(here.step(advance_ms=99), Rejected) == []
    assert [(r.request_id, r.code) for r in of(here.step(), Rejected)] == [
        ("second", "overloaded"),
        ("third", "overloaded"),
    ]


def test_a_failing_runner_ends_the_requests_of_its_step_and_publishes_nothing() -> None:
    here = bench()
    here.run(ask("before", range(8), max_tokens=1))
    here.submit(ask("r", range(30), max_tokens=5, breakpoints=(write(20),)))
    here.runner.fails = True

    events = here.step()
    here.runner.fails = False

    assert [type(event) for event in events] == [Admitted, Finished]
    assert (events[1].reason, events[1].message) == (
        "error",
        "The step failed: RuntimeError: injected failure",
    )
    assert not events[1].record.grants[0].committed
    assert here.core.stats()["kv_blocks_pinned"] == here.core.stats()["kv_blocks_reserved"] == 0
    assert here.run(ask("after", range(30)))[0].tokens_reused == 8


def test_a_live_lease_is_refreshed_and_a_lost_one_restored() -> None:
    here = bench()
    here.run(ask("writer", range(10), breakpoints=(write(7, ttl_ms=100),)))
    later = here.run(ask("reader", range(20), read_tokens=7, breakpoints=(read(7, ttl_ms=500),)))
    assert later[0].grants == (Grant(7, False, "refreshed", lease_id="boot:0"),)
    here.step(advance_ms=400)
    assert here.core.stats()["leases_live"] == 1
    here.step(advance_ms=500)
    assert here.core.stats()["leases_live"] == 0

    restored = here.run(ask("restorer", range(20), read_tokens=7, breakpoints=(read(7),)))

    assert restored[0].grants == (Grant(7, False, "granted"),)
    assert record_of(restored).grants == (
        Grant(7, False, "granted", committed=True, lease_id="boot:1"),
    )
    assert here.core.stats()["leases_live"] == 1


def test_writing_a_lease_that_lives_is_a_refresh_that_commits() -> None:
    here = bench()
    here.run(ask("first", range(12), breakpoints=(write(12),)))

    events = here.run(ask("second", range(12), breakpoints=(write(12),)))

    assert events[0] == Admitted("second", (Grant(12, True, "refreshed", lease_id="boot:0"),), 11)
    assert of(events, Committed) == [Committed("second", 12)]
    assert here.core.stats()["leases_live"] == 1


def test_a_lease_ends_its_ttl_and_grace_after_the_submit() -> None:
    here = bench(max_num_seqs=1)
    here.submit(ask("first", range(5), max_tokens=30))
    here.step()
    submitted_ms = here.now_ms
    here.submit(ask("second", range(50, 60), breakpoints=(write(8, ttl_ms=1_000),)))
    here.drain()

    assert here.core.next_expiry_ms() == submitted_ms + 1_000 + here.config.lease_grace_ms


def test_a_disabled_cache_reuses_nothing_and_refuses_every_lease() -> None:
    here = bench(enable_prefix_caching=False)
    here.run(ask("first", range(12)))

    events = here.run(ask("second", range(12), read_tokens=8, breakpoints=(write(12),)))

    assert events[0].grants == (Grant(12, True, "refused", "caching_disabled"),)
    assert record_of(events).tokens_read_recomputed == 8


def test_facts_are_journaled_before_their_events_leave() -> None:
    here = bench()
    here.submit(ask("r", range(10), max_tokens=1, breakpoints=(write(4), write(8))))

    for event in here.step():
        journal = here.journal
        assert event.request_id in journal.opened
        assert journal.commits["r"] == [4]
        assert not isinstance(event, Tokens)
    assert here.journal.opened["r"].finish_reason == "engine_lost"


def test_an_idle_step_does_nothing_but_expire() -> None:
    here = bench()
    assert here.step() == []
    here.run(ask("r", range(8), breakpoints=(write(8, ttl_ms=10),)))

    assert here.step(advance_ms=1_000) == []
    assert here.core.stats()["lease_expired_total"] == 1
    assert here.core.next_expiry_ms() is None


def test_reuse_is_counted_once_and_as_the_record_has_it() -> None:
    here = bench()
    here.run(ask("first", range(10), breakpoints=(write(6),)))
    here.run(ask("second", range(10), read_tokens=6))

    stats = here.core.stats()

    assert stats["prefix_tokens_queried_total"] == 20
    assert stats["prefix_tokens_reused_total"] == 8
    # The lease's second block has two more tokens by now: a gift, neither promised nor billed.
    assert stats["prefix_tokens_lease_read_total"] == 6


def test_ignore_eos_runs_to_max_tokens_through_stop_tokens() -> None:
    here = bench()
    request = ask("r", range(5), max_tokens=9)
    second = here.runner.continuation(request, 2)[1]

    events = here.run(ask("r", range(5), max_tokens=9, stop_token_ids=(second,), ignore_eos=True))

    assert (events[-1].reason, events[-1].record.output_tokens) == ("max_tokens", 9)


def test_a_stall_ends_leases_and_then_requests_until_the_core_is_idle(caplog) -> None:
    here = bench()
    here.run(ask("lease", range(8), breakpoints=(write(8, ttl_ms=1_000_000),)))
    here.submit(ask("running", range(50, 58), max_tokens=50))
    here.step()
    here.submit(ask("waiting", range(60, 68)))
    # A bug that no rule excludes: somebody pins the whole pool and never lets go.
    pool = here.core.scheduler.tables.pool
    for block in range(pool.num_blocks):
        pool.pin(block)
    here.core.scheduler._preempt(here.core.scheduler.running[-1])

    steps = [here.core.step(here.now_ms) for _ in range(3)]

    assert steps[0] == []
    assert (steps[1][0].request_id, steps[1][0].reason) == ("running", "error")
    assert steps[2] == [
        Rejected("waiting", "overloaded", "The engine could not schedule the request")
    ]
    stats = here.core.stats()
    assert (stats["steps_stalled_total"], stats["lease_dropped_total"]) == (3, 1)
    assert not here.core.has_work
    assert [record.message for record in caplog.records] == ["step_stalled"] * 3


def test_a_queue_under_load_is_bounded_and_nobody_in_it_is_older_than_its_deadline() -> None:
    here = bench(max_queue=10, max_num_seqs=2, max_queue_wait_ms=40)
    submitted_ms = {}
    codes = []
    for number in range(200):
        tenant = b"tenant-%d" % (number % 3)
        request = ask(f"r{number}", [*range(20), number % 5], max_tokens=7, namespace=tenant)
        rejected = here.submit(request)
        submitted_ms[request.request_id] = here.now_ms
        codes += [rejected.code] if rejected else []
        here.step()
        assert here.core.stats()["num_requests_waiting"] <= 10
        for sequence in here.core.scheduler.waiting.newcomers():
            assert here.now_ms < submitted_ms[sequence.request_id] + 40
    here.drain()

    assert codes
    assert set(codes) == {"overloaded"}
