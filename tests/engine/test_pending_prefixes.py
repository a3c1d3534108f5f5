"""Requests that wait for a prefix which a running one computes; small_config shares from 16 on."""

import pytest

from engine.protocol import Admitted, Breakpoint, Finished
from tests.engine.oracle import Bench, ask, small_config

DOCUMENT = list(range(40))


def bench(**changes: object) -> Bench:
    return Bench(small_config(max_num_batched_tokens=20, **changes))


def admissions(events) -> list[tuple[str, int]]:
    return [(e.request_id, e.tokens_reused) for e in events if isinstance(e, Admitted)]


def leader_and_follower(here: Bench, **fields: object) -> None:
    """Submit both; after this step the leader has computed 20 of the 40 tokens they share."""
    here.submit(ask("leader", [*DOCUMENT, 100], max_tokens=9))
    here.step()
    here.submit(ask("follower", [*DOCUMENT, 200], **fields))


def test_a_follower_waits_for_the_leader_and_then_reads_what_it_shares() -> None:
    here = bench(max_num_seqs=3)
    leader_and_follower(here)

    assert admissions(here.step()) == []
    assert here.core.stats()["num_requests_deferred"] == 0  # the step had no budget to look
    assert admissions(here.step()) == [("follower", 40)]


def test_identical_cold_prompts_cost_one_and_their_suffixes() -> None:
    here = bench()
    for number in range(8):
        here.submit(ask(f"r{number}", [*DOCUMENT, 100 + number], max_tokens=0))

    here.step()
    assert here.core.stats()["num_requests_waiting"] == 7
    here.drain()

    stats = here.core.stats()
    assert stats["tokens_computed_total"] == len(DOCUMENT) + 8


def test_a_burst_is_deferred_and_each_request_counts_once() -> None:
    here = Bench(small_config(max_num_batched_tokens=64))
    for number in range(4):
        here.submit(ask(f"r{number}", [*DOCUMENT, 100 + number], max_tokens=2))

    events = here.step()

    assert admissions(events) == [("r0", 0)]
    stats = here.core.stats()
    # The leader has committed by now, so nobody waits for it any more.
    assert (stats["num_requests_waiting"], stats["num_requests_deferred"]) == (3, 0)
    assert stats["deferrals_total"] == 3
    assert admissions(here.step()) == [("r1", 40), ("r2", 40), ("r3", 40)]
    here.drain()
    assert here.core.stats()["deferrals_total"] == 3


def deferred_behind_a_slow_leader(here: Bench) -> None:
    """A leader whose chunks end at breakpoints, so that every step has budget to look around."""
    cuts = tuple(Breakpoint(tokens, 10_000, write=True) for tokens in (4, 8, 12, 40))
    here.submit(ask("leader", [*DOCUMENT, 100], max_tokens=9, breakpoints=cuts))
    here.submit(ask("follower", [*DOCUMENT, 200]))
    here.step()
    assert here.core.stats()["num_requests_deferred"] == 1


def test_a_deferred_request_waits_holding_nothing_and_others_pass_it() -> None:
    here = bench()
    deferred_behind_a_slow_leader(here)
    here.submit(ask("other", [7, 7, 7], max_tokens=5))

    assert admissions(here.step()) == [("other", 0)]

    assert here.core.state_of("follower") == "waiting"
    stats = here.core.stats()
    assert (stats["num_requests_waiting"], stats["num_requests_deferred"]) == (1, 1)
    (waiting,) = here.core.scheduler.waiting
    assert waiting.blocks == []


@pytest.mark.parametrize("how", ["abort", "finish", "fail"])
def test_a_follower_goes_on_when_its_leader_ends(how: str) -> None:
    here = bench()
    deferred_behind_a_slow_leader(here)

    if how == "abort":
        here.core.abort("leader")
    elif how == "finish":
        here.core.finish("leader", 0)
    else:
        here.runner.fails = True
    events = here.step()
    here.runner.fails = False
    events += here.drain()

    assert admissions(events) == [("follower", 4)]
    (end,) = [e for e in events if isinstance(e, Finished) and e.request_id == "follower"]
    assert end.reason == "max_tokens"


def test_a_follower_goes_on_when_its_leader_is_preempted() -> None:
    here = bench()
    deferred_behind_a_slow_leader(here)

    here.core.scheduler._preempt(here.core.scheduler.running[-1])

    assert here.core.stats()["num_requests_deferred"] == 0
    ends = {e.request_id: e.reason for e in here.drain() if isinstance(e, Finished)}
    assert ends == {"leader": "max_tokens", "follower": "max_tokens"}


def test_a_follower_waits_no_longer_than_it_may() -> None:
    here = bench(max_defer_ms=10)
    deferred_behind_a_slow_leader(here)
    assert admissions(here.step(advance_ms=9)) == []

    assert admissions(here.step(advance_ms=1)) == [("follower", 8)]

    # Both compute the same now; the outputs are checked by the oracle.
    here.drain()


def test_a_request_that_would_save_too_little_does_not_wait() -> None:
    here = Bench(small_config(min_shared_tokens=16))
    here.submit(ask("leader", [*DOCUMENT, 100], max_tokens=9))
    here.submit(ask("follower", [*DOCUMENT[:15], *range(200, 220)]))

    assert admissions(here.step()) == [("leader", 0), ("follower", 0)]


def test_a_follower_waits_for_the_tail_of_its_leaders_breakpoint() -> None:
    here = bench()
    marked = (Breakpoint(38, 10_000, write=True),)
    here.submit(ask("leader", [*DOCUMENT[:38], *range(100, 110)], breakpoints=marked))
    here.submit(ask("follower", [*DOCUMENT[:38], *range(200, 210)]))

    assert ("follower", 38) in admissions(here.drain())


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        ({}, {"namespace": b"tenant-b"}),
        ({"enable_prefix_caching": False}, {}),
        ({"scheduling": "static"}, {}),
        ({"min_shared_tokens": 256}, {}),
    ],
)
def test_nobody_waits_for_what_it_could_not_read(config, fields) -> None:
    here = Bench(small_config(**config))
    here.submit(ask("leader", [1, *range(20)], max_tokens=2))
    here.submit(ask("follower", [1, *range(20)], **fields))

    assert [name for name, _ in admissions(here.step())] == ["leader", "follower"]


def test_a_deferred_request_is_refused_at_its_deadline_like_any_other() -> None:
    here = bench(max_queue=1, max_queue_wait_ms=50)
    cuts = tuple(Breakpoint(tokens, 10_000, write=True) for tokens in (4, 8, 12, 40))
    here.submit(ask("leader", [*DOCUMENT, 100], max_tokens=9, breakpoints=cuts))
    here.step()
    here.submit(ask("follower", [*DOCUMENT, 200]))
    here.step()
    assert here.core.stats()["num_requests_deferred"] == 1

    assert here.submit(ask("one more", [1])).code == "overloaded"
    events = here.step(advance_ms=50)

    assert [(e.request_id, e.code) for e in events if hasattr(e, "code")] == [
        ("follower", "overloaded")
    ]
