"""Whether memory stays flat: a robust slope, and the last third of a run against the middle."""

from collections.abc import Sequence
from itertools import combinations
from statistics import median

Point = tuple[float, float]  # minutes since the start, MB

SETTLED_MINUTES = 5  # until then caches and allocators fill up
LEAST_MINUTES = 15  # in a shorter run the slope is mostly noise
MOST_MB_PER_HOUR = 24.0
MOST_STEP_MB = 8.0


def slope_per_hour(points: Sequence[Point]) -> float:
    """Return the Theil-Sen slope: the median over all pairs, robust against outliers."""
    slopes = [(b - a) / (t - s) for (s, a), (t, b) in combinations(points, 2) if t > s]
    return 60 * median(slopes)


def settled(points: Sequence[Point]) -> list[Point]:
    """Return the samples taken after caches and allocators have filled up."""
    return [point for point in points if point[0] >= SETTLED_MINUTES]


def step_between_thirds(points: Sequence[Point]) -> float:
    """Return the median of the last third minus the median of the middle third."""
    end = points[-1][0]
    middle = [value for minute, value in points if end / 3 <= minute < 2 * end / 3]
    last = [value for minute, value in points if minute >= 2 * end / 3]
    return median(last) - median(middle)


def find_growth(points: Sequence[Point]) -> str | None:
    """Return a sentence on how memory grows over the run, or None if it is flat."""
    slope, step = slope_per_hour(settled(points)), step_between_thirds(points)
    if slope > MOST_MB_PER_HOUR:
        return f"memory grows by {slope:.1f} MB an hour; at most {MOST_MB_PER_HOUR}"
    if step > MOST_STEP_MB:
        return f"memory in the last third is {step:.1f} MB above the middle; at most {MOST_STEP_MB}"
    return None
