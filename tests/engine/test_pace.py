"""A step takes about as long as its target, whatever a prompt token costs."""

import pytest

from engine.plan import Plan
from engine.protocol import Tokens
from tests.engine.oracle import Bench, ask, small_config


def bench(target_ms: int | None) -> Bench:
    sizes = {"num_blocks": 2_000, "max_model_len": 7_000, "max_num_batched_tokens": 2_048}
    return Bench(small_config(**sizes, pin_cap_blocks=0, step_target_ms=target_ms))


class Device:
    """What a step costs: a fixed time, and one for each token of a prompt."""

    def __init__(self, here: Bench, *, step_ms: int, token_ms: float) -> None:
        self.here, self.step_ms, self.token_ms = here, step_ms, token_ms
        self.last_ms = 0

    def step(self) -> list:
        """One step, as long after the one before as that one took."""
        events = self.here.step(advance_ms=self.last_ms)
        self.last_ms = round(self.step_ms + self.token_ms * self.num_prompt_tokens())
        return events

    def num_prompt_tokens(self) -> int:
        return self.num_prompt_tokens_of(self.here.runner.plans[-1])

    def num_prompt_tokens_of(self, plan: Plan) -> int:
        return sum(len(row.token_ids) for row in plan.rows if row.output_index == 0)


@pytest.mark.parametrize(("step_ms", "token_ms"), [(5, 0.5), (20, 0.1), (80, 2), (150, 4)])
def test_a_stream_beside_a_long_prompt_waits_for_the_target_and_no_longer(
    step_ms: int, token_ms: float
) -> None:
    here = bench(target_ms=200)
    device = Device(here, step_ms=step_ms, token_ms=token_ms)
    here.submit(ask("stream", range(30), max_tokens=900, namespace=b"a"))
    for _ in range(3):
        device.step()
    here.submit(ask("prompt", [n % 1_000 for n in range(6_000)], namespace=b"b"))

    waits = []
    while here.core.state_of("prompt") is not None:
        events = device.step()
        assert any(isinstance(e, Tokens) and e.request_id == "stream" for e in events)
        waits.append(device.last_ms)

    # What was not measured yet is 64 tokens; from then on a step is at most the target.
    assert waits[0] <= round(step_ms + 64 * token_ms)
    assert max(waits[1:]) <= 200 + step_ms
    assert len(waits) < 6_000


def test_a_prompt_alone_is_computed_in_longer_steps() -> None:
    here = bench(target_ms=200)
    device = Device(here, step_ms=20, token_ms=1)
    here.submit(ask("prompt", [n % 1_000 for n in range(6_000)]))

    while here.core.state_of("prompt") is not None:
        device.step()

    assert 700 < max(device.num_prompt_tokens_of(plan) for plan in here.runner.plans) <= 1_000


def test_the_time_between_two_requests_is_not_a_steps_time() -> None:
    here = bench(target_ms=200)
    device = Device(here, step_ms=1, token_ms=0.1)
    for number in range(3):
        prompt = [n % 1_000 for n in range(number, 6_000 + number)]
        here.submit(ask(f"prompt {number}", prompt))
        while here.core.state_of(f"prompt {number}") is not None:
            device.step()
        here.now_ms += 3_600_000

    # Only the first prompt's first chunks are small.
    assert len(here.runner.plans) == 4 + 3 + 3


def test_without_a_target_a_step_has_its_whole_budget() -> None:
    here = bench(target_ms=None)
    device = Device(here, step_ms=20, token_ms=10)
    here.submit(ask("prompt", [n % 1_000 for n in range(6_000)]))

    here.step()
    device.step()

    assert device.num_prompt_tokens() == 2_048
