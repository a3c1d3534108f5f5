"""A failed step: the rows that cannot be computed fail alone, and a lost device ends the engine."""

import pytest

from engine.errors import DeviceLost, StepsFailing
from engine.protocol import Finished, Tokens
from engine.step_runner import MAX_FAILED_STEPS
from tests.engine.oracle import Bench, ask, small_config


def bench(**changes: object) -> Bench:
    return Bench(small_config(**changes))


def submit_many(here: Bench, count: int) -> list[str]:
    names = [f"r{number}" for number in range(count)]
    for number, name in enumerate(names):
        here.submit(ask(name, range(number, number + 4), max_tokens=3))
    return names


def ends(here: Bench) -> dict[str, str]:
    reasons = {}
    while here.core.has_work:
        reasons |= {e.request_id: e.reason for e in here.step() if isinstance(e, Finished)}
    return reasons


@pytest.mark.parametrize("bad", ["r0", "r3", "r6"])
def test_a_row_that_cannot_be_computed_fails_alone(bad: str) -> None:
    here = bench()
    names = submit_many(here, 7)
    here.runner.failing = {bad}

    assert ends(here) == dict.fromkeys(names, "max_tokens") | {bad: "error"}
    stats = here.core.stats()
    assert (stats["steps_failed_total"], stats["rows_failed_total"]) == (1, 1)


def test_a_row_without_finite_logits_fails_alone_and_leaves_nothing() -> None:
    here = bench()
    names = submit_many(here, 3)
    here.runner.not_finite = {"r1"}

    events = here.step()

    (finished,) = [event for event in events if isinstance(event, Finished)]
    assert (finished.request_id, finished.reason) == ("r1", "error")
    assert finished.message == "The model computed no finite logits"
    assert finished.record.output_tokens == 0
    assert {e.request_id for e in events if isinstance(e, Tokens)} == {"r0", "r2"}
    here.runner.not_finite.clear()
    assert ends(here) == dict.fromkeys(names[::2], "max_tokens")
    assert here.core.stats()["requests_not_finite_total"] == 1
    assert here.run(ask("again", range(1, 5)))[0].tokens_reused == 0


def test_a_step_that_succeeds_in_parts_fails_no_request() -> None:
    here = bench()
    names = submit_many(here, 4)
    execute, too_large = here.runner.execute, 3

    def execute_small(plan):
        if len(plan.rows) >= too_large:
            raise RuntimeError("out of memory")
        return execute(plan)

    here.runner.execute = execute_small

    assert ends(here) == dict.fromkeys(names, "max_tokens")


def test_many_steps_in_a_row_without_any_result_end_the_engine() -> None:
    here = bench()
    here.runner.fails = True
    for number in range(MAX_FAILED_STEPS - 1):
        here.submit(ask(f"r{number}", range(4)))
        here.step()
    here.submit(ask("last", range(4)))

    with pytest.raises(StepsFailing, match="8 steps in a row failed"):
        here.step()


def test_one_request_that_fails_again_and_again_beside_others_ends_nothing() -> None:
    here = bench()
    here.submit(ask("good", range(10, 14), max_tokens=30))
    for number in range(2 * MAX_FAILED_STEPS):
        here.submit(ask(f"bad{number}", range(4)))
        here.runner.failing = {f"bad{number}"}
        here.step()

    assert here.core.stats()["rows_failed_total"] == 2 * MAX_FAILED_STEPS


def test_a_lost_device_ends_the_engine_at_once() -> None:
    here = bench()
    submit_many(here, 2)

    def execute(plan):
        raise DeviceLost("CUDA error: an illegal memory access was encountered")

    here.runner.execute = execute

    with pytest.raises(DeviceLost, match="must be started again: CUDA error"):
        here.step()
