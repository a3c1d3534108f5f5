"""Faults that other engines had in public, by their row in docs/cases/engine.md.

Row 15, results of an old step applied after preemption, needs asynchronous steps: here a request
is preempted only while a step is planned, never while one runs, so no result is ever late. Row 31,
batch jobs that flush the cache, is not answered: a request cannot opt out of being cached; leases
are what keeps a prefix.
"""

import numpy as np
import pytest

from engine.blocks.prefix_index import TOKEN_DTYPE, PrefixChain
from engine.protocol import Admitted, Breakpoint, Finished, Grant
from tests.engine.oracle import Bench, ask, small_config, unpack


def bench(**changes: object) -> Bench:
    return Bench(small_config(**changes))


def of(events, kind):
    return [event for event in events if isinstance(event, kind)]


def records(events) -> dict:
    return {event.request_id: event.record for event in of(events, Finished)}


def write(*lengths: int, ttl_ms: int = 10_000) -> tuple[Breakpoint, ...]:
    return tuple(Breakpoint(tokens, ttl_ms, write=True) for tokens in lengths)


def reused(here: Bench, request_id: str, ids) -> int:
    """Run a prompt and return how much of it was read."""
    (admitted,) = of(here.run(ask(request_id, ids, max_tokens=0)), Admitted)
    return admitted.tokens_reused


def found(here: Bench, ids) -> int:
    """How much of a prompt could be read now."""
    tokens = np.array(list(ids), dtype=TOKEN_DTYPE)
    chain = PrefixChain(b"tenant-a", tokens, here.config.block_size)
    return here.core.scheduler.tables.index.match(chain, len(tokens)).num_tokens


def test_row_08_preemption_adds_nothing_to_what_was_read() -> None:
    here = bench(num_blocks=14, pin_cap_blocks=0, max_model_len=48)
    here.run(ask("first", range(12), max_tokens=0))
    for number in range(3):
        prompt = [*range(8), 100 + number, 50, 51, 52, 53]
        here.submit(ask(f"r{number}", prompt, max_tokens=30, read_tokens=8))

    ends = records(here.drain())

    assert max(record.num_preemptions for record in ends.values()) >= 1
    for record in ends.values():
        assert (record.tokens_reused_promised, record.tokens_computed) == (8, 5)
        assert record.tokens_reused_promised <= record.prompt_tokens - 1


def test_row_09_reuse_is_counted_when_blocks_are_attached_not_when_they_are_found() -> None:
    here = bench(num_blocks=14, pin_cap_blocks=0, max_model_len=48)
    here.run(ask("first", range(8), max_tokens=0))
    here.submit(ask("running", range(100, 130), max_tokens=9))
    here.step()
    here.submit(ask("blocked", [*range(8), *range(200, 232)], max_tokens=0))
    for _ in range(5):
        here.step()
    assert here.core.state_of("blocked") == "waiting"
    assert here.core.stats()["prefix_tokens_reused_total"] == 0
    assert here.core.stats()["prefix_tokens_queried_total"] == 8 + 30

    here.drain()

    assert here.core.stats()["prefix_tokens_queried_total"] == 8 + 30 + 40
    assert here.core.stats()["prefix_tokens_reused_total"] == 8


def test_row_11_only_granted_breakpoints_are_written_not_all_that_was_computed() -> None:
    here = bench(pin_cap_blocks=4, namespace_quota_blocks=4)
    here.run(ask("first", range(10), breakpoints=write(8)))

    events = here.run(ask("r", range(40), read_tokens=8, breakpoints=write(8, 16, 40)))

    record = records(events)["r"]
    assert record.grants == (
        Grant(8, True, "refreshed", None, committed=True, lease_id="boot:0"),
        Grant(16, True, "granted", None, committed=True, lease_id="boot:1"),
        Grant(40, True, "refused", "quota", committed=False),
    )
    assert (record.tokens_reused_promised, record.tokens_computed) == (8, 32)
    assert records(here.run(ask("plain", range(50, 70))))["plain"].grants == ()


@pytest.mark.parametrize("how", ["abort", "preempt", "fail"])
def test_row_13_what_was_not_computed_is_never_found(how: str) -> None:
    here = bench(max_num_batched_tokens=10)
    here.submit(ask("first", range(30), max_tokens=5))
    here.step()  # ten of thirty are computed; blocks for all of them are allocated
    if how == "abort":
        here.core.abort("first")
    elif how == "preempt":
        here.core.scheduler._preempt(here.core.scheduler.running[-1])
        here.core.abort("first")
    else:
        here.runner.fails = True
    here.step()
    here.runner.fails = False

    # The oracle would find garbage in what it reads.
    assert reused(here, "retry", range(30)) == 8


def test_row_14_nobody_sees_what_the_last_user_of_a_block_left_in_it() -> None:
    here = bench(num_blocks=12, pin_cap_blocks=0, max_model_len=44)
    for number in range(30):
        # Every length of tail, in blocks that another tenant has just filled to the end.
        tenant = b"tenant-a" if number % 2 else b"tenant-b"
        length = 40 if number % 2 else 1 + number
        request = ask(f"r{number}", [number] * min(length, 38), max_tokens=6, namespace=tenant)
        here.run(request)
        # Each slot that a row attends to was compared with what its own request put there.
        assert here.journal.closed[f"r{number}"].output_tokens == 6


def test_row_16_a_queue_never_stands_still_while_nothing_runs() -> None:
    here = bench(max_num_seqs=2, max_num_batched_tokens=8, num_blocks=24)
    for number in range(40):
        prompt = [*range(number % 7), *range(16)]
        here.submit(ask(f"r{number}", prompt, max_tokens=3, breakpoints=write(len(prompt))))
    num_ended = 0

    while here.core.has_work:
        here.core.abort(f"r{num_ended * 3}")
        num_ended += len(of(here.step(), Finished))  # the bench asserts that no step stalls

    assert num_ended == 40


def test_row_17_everyone_wanting_one_more_block_at_once_does_not_hang() -> None:
    # 96 blocks, 32 requests on a shared prefix of 59, each about to need a block of its own.
    here = bench(
        num_blocks=96,
        max_model_len=59 * 4 + 24,
        pin_cap_blocks=0,
        namespace_quota_blocks=0,
        max_num_seqs=32,
        max_num_batched_tokens=512,
    )
    prefix = list(range(59 * 4))
    here.run(ask("prefix", [*prefix, 1], max_tokens=0))
    for number in range(32):
        here.submit(ask(f"r{number}", [*prefix, number, 1, 2], max_tokens=20))

    ends = records(here.drain())

    assert [ends[f"r{number}"].output_tokens for number in range(32)] == [20] * 32
    assert here.core.stats()["preemptions_total"] > 0


def test_row_18_whoever_is_admitted_has_blocks_for_all_its_tokens() -> None:
    here = bench(num_blocks=20, pin_cap_blocks=0, max_num_batched_tokens=8)
    for number in range(6):
        here.submit(ask(f"r{number}", [number] * 24, max_tokens=12))

    events = []
    while here.core.has_work:
        events += here.step()
        for sequence in here.core.scheduler.running:
            assert len(sequence.blocks) * 4 >= sequence.num_tokens - 1

    # Without the reserve each would be preempted several times.
    assert here.core.stats()["preemptions_total"] <= 6
    assert len(of(events, Finished)) == 6


def test_row_19_equal_blocks_live_side_by_side_and_leave_one_at_a_time() -> None:
    here = bench(num_blocks=20, pin_cap_blocks=8, min_shared_tokens=256)
    for name in ("one", "two"):
        here.submit(ask(name, range(14), max_tokens=0, breakpoints=write(14, ttl_ms=0)))
    here.drain()
    assert here.core.stats()["tokens_computed_total"] == 28  # each in blocks of its own
    here.step(advance_ms=1_000)  # the lease ends, and of what is cached its blocks go first

    seen = []
    for number in range(12):
        here.run(ask(f"other {number}", [100 + number] * 9, max_tokens=0))
        seen.append(found(here, range(14)))

    # Readable to its tail while one copy is whole, then gone, never stale.
    assert seen[0] == 13
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] == 0


def test_row_20_identical_cold_prompts_are_computed_once() -> None:
    here = bench(max_num_seqs=32, max_num_batched_tokens=16)
    for number in range(16):
        here.submit(ask(f"r{number}", [*range(40), number], max_tokens=2, breakpoints=write(40)))

    ends = records(here.drain())

    outcomes = [ends[f"r{number}"].grants[0].outcome for number in range(16)]
    assert outcomes == ["granted"] + ["refreshed"] * 15
    assert sum(record.tokens_computed for record in ends.values()) == 40 + 16


def test_row_29_a_long_prefix_is_evicted_from_its_end() -> None:
    here = bench(num_blocks=16, pin_cap_blocks=0)
    here.run(ask("long", range(40), max_tokens=0))

    here.run(ask("other", range(100, 140), max_tokens=0))  # takes all but six blocks

    assert reused(here, "again", range(40)) == 24


def test_row_30_reading_a_prefix_keeps_it() -> None:
    here = bench(num_blocks=14, pin_cap_blocks=0, max_model_len=48)
    here.run(ask("old", range(9), max_tokens=0))
    here.run(ask("young", range(50, 59), max_tokens=0))
    here.run(ask("reader", [*range(8), 99], max_tokens=0))

    here.run(ask("large", range(100, 146), max_tokens=0))

    assert (found(here, range(9)), found(here, range(50, 59))) == (8, 0)


def test_row_30_looking_for_a_prefix_does_not_keep_it() -> None:
    here = bench(num_blocks=14, pin_cap_blocks=0, max_model_len=48)
    here.run(ask("old", range(9), max_tokens=0))
    here.run(ask("young", range(50, 59), max_tokens=0))
    here.submit(ask("running", range(100, 130), max_tokens=9))
    here.submit(ask("blocked", [*range(8), *range(200, 232)]))
    here.step()
    assert here.core.state_of("blocked") == "waiting"  # it was matched, and did not fit
    for name in ("running", "blocked"):
        here.core.abort(name)

    here.run(ask("small", range(300, 318), max_tokens=0))

    assert (found(here, range(9)), found(here, range(50, 59))) == (0, 8)


@pytest.mark.parametrize("budget", [1, 3, 4, 5, 8, 16])
def test_row_32_chunks_and_prompts_around_block_multiples(budget: int) -> None:
    for length in (1, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17):
        here = bench(max_num_batched_tokens=budget)
        request = ask("r", range(length), max_tokens=6)
        events = here.run(request)
        output = [
            token for event in events if hasattr(event, "token_ids") for token in event.token_ids
        ]
        assert output == here.runner.continuation(request, 6)
        again = ask("again", [*unpack(request.prompt_token_ids), *output[:5], 1], max_tokens=6)
        assert len(of(here.run(again), Finished)) == 1
