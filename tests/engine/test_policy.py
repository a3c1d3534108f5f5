"""Static batches, contiguous KV, one at a time: the same engine with a part switched off."""

from engine.protocol import Admitted, Breakpoint, Finished
from tests.engine.oracle import Bench, ask, small_config

LENGTHS = (2, 9, 4, 14, 6, 3)


def bench(**changes: object) -> Bench:
    return Bench(small_config(**({"num_blocks": 64, "pin_cap_blocks": 0} | changes)))


def submit_all(here: Bench) -> None:
    for number, max_tokens in enumerate(LENGTHS):
        here.submit(ask(f"r{number}", [number] * 10, max_tokens=max_tokens))


def batches(here: Bench) -> list[int]:
    """How many sequences each step served."""
    return [len(plan.rows) for plan in here.runner.plans]


def test_a_static_batch_is_filled_once_and_run_dry() -> None:
    here = bench(scheduling="static", max_num_seqs=3)
    submit_all(here)

    here.drain()

    assert batches(here) == [3, 3, *[2] * 2, *[1] * 5, *[3] * 3, *[2] * 3, *[1] * 8]


def test_a_continuous_batch_refills_each_running_slot_at_once() -> None:
    here = bench(max_num_seqs=3)
    submit_all(here)

    here.drain()

    assert len(batches(here)) < 20
    assert sum(batches(here)) == sum(LENGTHS)


def test_a_static_batch_fills_over_as_many_steps_as_its_prompts_take() -> None:
    here = bench(scheduling="static", max_num_seqs=3, max_num_batched_tokens=8)
    submit_all(here)

    admitted = []
    while here.core.state_of("r1") != "running" or len(admitted) < 3:
        admitted += [e.request_id for e in here.step() if isinstance(e, Admitted)]
    late = []
    while any(here.core.state_of(f"r{number}") for number in range(3)):
        late += [e for e in here.step() if isinstance(e, Admitted)]

    assert admitted == ["r0", "r1", "r2"]
    assert late == []
    here.drain()


def test_in_a_static_batch_the_preempted_come_back_and_nobody_is_new() -> None:
    here = bench(scheduling="static", num_blocks=12, max_model_len=40)
    for number in range(3):
        here.submit(ask(f"r{number}", [number] * 10, max_tokens=30))
    here.step()
    here.submit(ask("late", [9]))

    ends = [e.request_id for e in here.drain() if isinstance(e, Finished)]

    assert here.core.stats()["preemptions_total"] > 0
    assert ends[-1] == "late"


def test_contiguous_kv_is_reserved_at_admission_and_held_to_the_end() -> None:
    here = bench(kv_layout="contiguous")
    here.submit(ask("r", range(10), max_tokens=22))
    here.step()
    (sequence,) = here.core.scheduler.running
    assert len(sequence.blocks) == 8
    stats = here.core.stats()
    assert (stats["kv_slots_reserved"], stats["kv_slots_live"]) == (32, 11)

    while here.core.state_of("r"):
        assert len(sequence.blocks) == 8
        here.step()

    assert here.core.stats()["kv_slots_reserved"] == 0


def test_contiguous_kv_admits_only_whom_it_can_let_finish() -> None:
    here = bench(kv_layout="contiguous", num_blocks=20)
    for number in range(5):
        here.submit(ask(f"r{number}", [number] * 10, max_tokens=30))
    here.step()
    assert here.core.stats()["num_requests_running"] == 2

    here.drain()

    assert here.core.stats()["preemptions_total"] == 0


def test_waste_is_what_is_reserved_and_not_live() -> None:
    waste = {}
    for layout in ("paged", "contiguous"):
        here = bench(kv_layout=layout)
        here.run(ask("r", range(8), max_tokens=24, stop_token_ids=(-1,)))
        stats = here.core.stats()
        live, reserved = (stats[f"step_kv_slots_{what}_total"] for what in ("live", "reserved"))
        assert live == sum(range(8, 32))
        waste[layout] = 1 - live / reserved

    # Paged wastes half a block of 4 on average, contiguous half of the output.
    assert waste["paged"] < 0.08
    assert 0.35 < waste["contiguous"] < 0.4


def test_occupancy_is_rows_over_steps() -> None:
    here = bench(scheduling="static", max_num_seqs=3)
    submit_all(here)
    here.drain()

    stats = here.core.stats()

    assert stats["step_rows_total"] == sum(LENGTHS)
    assert stats["steps_total"] == 9 + 14


def test_one_at_a_time_is_a_batch_of_one() -> None:
    here = bench(max_num_seqs=1)
    submit_all(here)

    here.drain()

    assert set(batches(here)) == {1}


def test_every_mode_gives_the_same_output() -> None:
    cut = (Breakpoint(6, 10_000, write=True),)
    outputs = []
    for changes in ({}, {"scheduling": "static"}, {"kv_layout": "contiguous"}):
        here = Bench(small_config(**changes))
        for number in range(5):
            here.submit(ask(f"r{number}", [*range(8), number], max_tokens=9, breakpoints=cut))
        events = here.drain()
        outputs.append(
            {
                f"r{number}": [
                    token
                    for event in events
                    if getattr(event, "ids", None) and event.request_id == f"r{number}"
                    for token in event.token_ids
                ]
                for number in range(5)
            }
        )

    assert outputs[0] == outputs[1] == outputs[2]
