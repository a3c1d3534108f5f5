"""Memory that grows is seen; memory that is only uneven is flat."""

import random

from bench.flatness import find_growth, slope_per_hour, step_between_thirds


def run(grows_mb_per_hour: float, *, noise_mb: float = 2.0) -> list[tuple[float, float]]:
    """Thirty minutes: 300 MB of caches fill up in the first five, then this."""
    chance = random.Random(1)
    minutes = [number / 2 for number in range(61)]
    return [
        (t, 700 + 60 * min(t, 5) + grows_mb_per_hour * t / 60 + chance.uniform(0, noise_mb))
        for t in minutes
    ]


def test_what_fills_up_at_first_and_is_uneven_after_that_is_flat() -> None:
    assert find_growth(run(0)) is None
    assert find_growth(run(-100)) is None


def test_an_odd_sample_does_not_tilt_the_line() -> None:
    points = run(0, noise_mb=0.0)
    points[-1] = (30.0, 5_000.0)

    assert slope_per_hour(points[10:]) == 0
    assert find_growth(points) is None


def test_a_slow_leak_is_seen() -> None:
    assert "MB an hour" in str(find_growth(run(40)))


def test_a_step_that_stays_is_seen() -> None:
    points = [(t, value + (20 if t >= 20 else 0)) for t, value in run(0)]

    assert 18 < step_between_thirds(points) < 22
    assert find_growth(points) is not None
