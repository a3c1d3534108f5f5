import pytest

from engine.protocol import Admitted, Breakpoint, Committed, Finished
from tests.engine.oracle import Bench, ask, small_config


def bench(**changes: object) -> Bench:
    return Bench(small_config(**changes))


def chunks(here: Bench, request_id: str) -> list[int]:
    """How many tokens of a request each step computed."""
    rows = [row for plan in here.runner.plans for row in plan.rows]
    return [len(row.token_ids) for row in rows if row.request_id == request_id]


def breakpoints(*lengths: int) -> tuple[Breakpoint, ...]:
    return tuple(Breakpoint(tokens, 10_000, write=True) for tokens in lengths)


def test_a_prompt_is_computed_in_chunks_of_the_budget() -> None:
    here = bench(max_num_batched_tokens=10)

    here.run(ask("r", range(25), max_tokens=3))

    assert chunks(here, "r") == [10, 10, 5, 1, 1]


def test_running_sequences_are_served_before_the_queue_and_share_its_steps() -> None:
    here = bench(max_num_batched_tokens=10)
    here.submit(ask("first", range(5), max_tokens=9))
    here.submit(ask("second", range(100, 118), max_tokens=2))

    here.step()
    here.step()

    first, second = here.runner.plans
    assert [(row.request_id, len(row.token_ids)) for row in first.rows] == [
        ("first", 5),
        ("second", 5),
    ]
    assert [(row.request_id, len(row.token_ids)) for row in second.rows] == [
        ("first", 1),
        ("second", 9),
    ]


@pytest.mark.parametrize("enable_chunked_prefill", [True, False])
def test_chunks_end_exactly_at_granted_breakpoints(enable_chunked_prefill) -> None:
    here = bench(enable_chunked_prefill=enable_chunked_prefill, min_lease_tokens=3)
    here.submit(ask("r", range(30), breakpoints=breakpoints(2, 7, 16, 30)))

    steps = [here.step() for _ in range(3)]

    assert chunks(here, "r") == [7, 9, 14]
    committed = [[e.num_tokens for e in step if isinstance(e, Committed)] for step in steps]
    assert committed == [[7], [16], [30]]


def test_an_unchunked_prompt_takes_one_step_beyond_the_budget() -> None:
    here = bench(enable_chunked_prefill=False, max_num_batched_tokens=10)
    here.submit(ask("decoding", range(5), max_tokens=9))
    here.step()
    here.submit(ask("long", range(100, 130), max_tokens=1))
    here.submit(ask("also long", range(200, 230), max_tokens=1))

    here.drain()

    assert chunks(here, "long") == chunks(here, "also long") == [30]
    assert max(len(plan.rows) for plan in here.runner.plans) == 2


def test_the_head_of_the_queue_is_never_skipped() -> None:
    here = bench(num_blocks=14, pin_cap_blocks=2, max_model_len=48)
    here.submit(ask("running", range(30), max_tokens=2))
    here.step()
    here.submit(ask("large", range(100, 140)))
    here.submit(ask("small", range(200, 202)))

    events = here.drain()

    admitted = [e.request_id for e in events if isinstance(e, Admitted)]
    assert admitted == ["large", "small"]


def test_one_block_for_each_running_sequence_stays_free_at_admission() -> None:
    here = bench(num_blocks=10, pin_cap_blocks=0, max_model_len=40)
    here.submit(ask("running", range(20), max_tokens=20))
    here.step()
    here.submit(ask("exact", range(100, 120), max_tokens=1))
    here.step()
    assert here.core.state_of("exact") == "waiting"

    here.core.abort("exact")
    here.submit(ask("leaves one", range(100, 112), max_tokens=1))
    events = here.step()

    assert any(isinstance(e, Admitted) and e.request_id == "leaves one" for e in events)


def test_the_youngest_is_preempted_and_ends_with_the_same_output() -> None:
    here = bench(num_blocks=12, pin_cap_blocks=0, max_model_len=40)
    requests = [ask(name, [number] * 13, max_tokens=27) for number, name in enumerate("abc")]
    for request in requests:
        here.submit(request)

    events = here.drain()

    stats = here.core.stats()
    assert stats["preemptions_total"] > 0
    ends = {e.request_id: e.record for e in events if isinstance(e, Finished)}
    assert [ends[name].output_tokens for name in "abc"] == [27, 27, 27]
    assert ends["a"].num_preemptions == 0
    for name in "bc":
        assert ends[name].tokens_computed == 13
    assert sum(record.num_preemptions for record in ends.values()) == stats["preemptions_total"]
    # Resumption rereads what is still cached, and counts the rest as the operator's loss.
    assert ends["c"].tokens_recomputed_preemption > 0
    assert stats["prefix_tokens_queried_total"] == 39


def test_the_queue_is_in_arrival_order_after_preemption() -> None:
    here = bench(num_blocks=12, pin_cap_blocks=0, max_model_len=40)
    for number, name in enumerate("abcd"):
        here.submit(ask(name, [number] * 13, max_tokens=27))
    while here.core.has_work:
        here.step()
        order = [s.request_id for s in (*here.core.scheduler.running, *here.core.scheduler.waiting)]
        assert order == sorted(order)
    assert here.core.stats()["preemptions_total"] > 0


def test_a_preempted_request_does_not_time_out() -> None:
    here = bench(num_blocks=12, pin_cap_blocks=0, max_model_len=40, max_queue_wait_ms=1)
    for number, name in enumerate("ab"):
        here.submit(ask(name, [number] * 16, max_tokens=24))
    events = here.step(advance_ms=0) + here.drain()

    ends = {e.request_id: e.record for e in events if isinstance(e, Finished)}
    assert ends["b"].num_preemptions > 0
    assert ends["b"].output_tokens == 24


def test_a_reservation_survives_preemption_and_goes_on_in_its_own_tail() -> None:
    # Small steps, so that the preemption falls between the two breakpoints, inside a block.
    here = bench(num_blocks=16, max_model_len=48, pin_cap_blocks=4, max_num_batched_tokens=3)
    here.submit(ask("old", [1], max_tokens=47))
    here.step()
    here.submit(ask("young", range(500, 542), breakpoints=breakpoints(6, 14), max_tokens=1))
    while not here.journal.commits.get("young"):
        here.step()
    assert here.core.stats()["kv_blocks_pinned"] == 2
    assert here.core.stats()["kv_blocks_reserved"] == 2
    kept = list(here.core.scheduler.running[1].blocks[:2])

    here.core.scheduler._preempt(here.core.scheduler.running[-1])
    here.core.check_integrity()
    assert here.core.stats()["kv_blocks_pinned"] == 2
    while here.core.state_of("young") == "waiting":
        here.step()

    assert here.core.scheduler.running[1].blocks[:2] == kept
    assert here.runner.num_copies == 0
    events = here.drain()
    (record,) = [e.record for e in events if getattr(e, "reason", None) and e.request_id == "young"]
    assert [grant.committed for grant in record.grants] == [True, True]
    assert here.core.stats()["leases_live"] == 2


def test_a_reader_copies_the_tail_and_its_owner_keeps_appending() -> None:
    here = bench()
    here.submit(ask("owner", range(6), max_tokens=20, breakpoints=breakpoints(6)))
    here.step()
    here.submit(ask("reader", [*range(6), 77, 78, 79], max_tokens=20))

    events = here.step()

    assert events[0] == Admitted("reader", (), 6)
    (copy,) = here.runner.plans[-1].copies
    assert copy.num_slots == 2
    owner, reader = here.core.scheduler.running
    assert owner.blocks[0] == reader.blocks[0]
    assert owner.blocks[1] == copy.source
    assert reader.blocks[1] == copy.target
    here.drain()


def test_a_copys_source_never_keeps_the_last_request_out() -> None:
    here = bench(num_blocks=10, pin_cap_blocks=0, max_model_len=40)
    here.run(ask("first", range(38), max_tokens=2))

    # All ten blocks are needed, so the cut last block cannot also be a source to copy from.
    admitted = here.run(ask("second", range(40), max_tokens=0))[0]

    assert admitted.tokens_reused == 36


def test_waiting_requests_hold_no_blocks() -> None:
    here = bench(max_num_seqs=1)
    here.submit(ask("running", range(8), max_tokens=9))
    here.submit(ask("waiting", range(8)))
    here.step()

    assert [s.blocks for s in here.core.scheduler.waiting] == [[]]


def test_a_request_is_pinned_only_up_to_its_breakpoint() -> None:
    here = bench()

    here.run(ask("r", range(30), breakpoints=breakpoints(9)))

    assert here.core.stats()["kv_blocks_pinned"] == 3
