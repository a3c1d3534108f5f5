"""The gateway's time never runs backwards, and goes on while the wall clock is behind."""

from pathlib import Path

import pytest

from gateway.clock import Clock
from tests.gateway.books import assert_books_agree
from tests.gateway.stack import Stack, running_stack
from tests.gateway.talk import Split, split_of, text, user

HOUR_MS = 3_600_000
BODY = {"system": [text(1000, "s", ttl="5m")], "messages": [user(text(20, "u"))], "max_tokens": 3}


class Times:
    """A wall clock and a monotonic clock that a test moves."""

    def __init__(self) -> None:
        self.wall_ms, self.monotonic_ms = 1_000_000, 0
        self.clock = Clock(wall_ms=lambda: self.wall_ms, monotonic_ms=lambda: self.monotonic_ms)

    def pass_ms(self, ms: int) -> None:
        self.wall_ms += ms
        self.monotonic_ms += ms


def test_time_is_the_wall_clocks_while_it_runs_forwards() -> None:
    times = Times()
    times.pass_ms(10)
    times.wall_ms += 5_000

    assert times.clock() == times.wall_ms


def test_a_wall_clock_that_steps_back_is_not_followed_until_it_has_caught_up() -> None:
    times = Times()
    times.wall_ms -= HOUR_MS

    seen = [times.clock()]
    times.pass_ms(40)
    seen.append(times.clock())
    times.wall_ms += HOUR_MS + 7
    seen.append(times.clock())

    assert seen == [1_000_000, 1_000_040, 1_000_047]


def test_what_another_process_has_seen_has_passed() -> None:
    times = Times()
    times.clock.advance_to(1_500_000)
    times.clock.advance_to(1_200_000)
    times.pass_ms(1)

    assert times.clock() == 1_500_001


@pytest.fixture
def stack(tmp_path: Path):
    with running_stack(tmp_path) as stack:
        yield stack


def test_a_step_back_stops_no_sale_and_prolongs_no_entry(stack: Stack) -> None:
    stack.post(BODY)

    stack.wall_steps_ms -= HOUR_MS
    at_once = stack.post(BODY)
    stack.clock.advance(40 * 60_000)
    later = stack.post(BODY)

    assert split_of(at_once) == Split(read=1000, input=20)
    assert split_of(later) == Split(w5=1000, input=20)


def test_a_request_does_not_end_before_it_began(stack: Stack) -> None:
    stack.runner.gate.clear()
    with stack.in_background(BODY) as answer:
        stack.wait_until(lambda: len(stack.open_holds()) == 1)
        stack.wall_steps_ms -= HOUR_MS
        stack.runner.gate.set()

    record = assert_books_agree(stack, answer.result().headers["request-id"])
    assert record["ended_at_ms"] >= record["started_at_ms"]
