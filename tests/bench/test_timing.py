"""Times are what `vllm bench serve` calls by the same names."""

import pytest

from bench.timing import Timing, goodput, median_interval, percentile


def test_the_five_measures_of_one_request() -> None:
    timing = Timing(sent_s=10.0, arrivals_s=[10.5, 10.75, 11.5], output_tokens=3)

    assert timing.ttft_ms == 500
    assert timing.e2el_ms == 1_500
    assert timing.tpot_ms == 500
    assert timing.itls_ms == [250, 750]


def test_a_percentile_lies_between_neighbours() -> None:
    assert percentile([4, 1, 3, 2], 50) == 2.5
    assert percentile([5], 99) == 5
    assert percentile(range(101), 99) == 99


def test_goodput_counts_who_met_every_objective() -> None:
    fast = Timing(0.0, [0.1, 0.2], output_tokens=2)
    late = Timing(0.0, [0.9, 1.0], output_tokens=2)
    slow = Timing(0.0, [0.1, 0.9], output_tokens=2)

    assert goodput([fast, late, slow], seconds=2, ttft_ms=500, tpot_ms=200) == 0.5


def test_the_interval_of_a_median_is_two_of_the_values() -> None:
    low, high = median_interval(list(range(20)))

    assert (low, high) == (5, 15)
    assert median_interval([1.0]) == (1.0, pytest.approx(1.0))
