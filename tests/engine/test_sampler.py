"""The sampler's laws: what is greedy, what repeats, and what the draws look like together."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.compute.sampler import Sampler
from engine.plan import Row
from engine.protocol import Sampling
from tests.engine.naive_sampling import naive_probabilities
from tests.engine.rows import row

ENTROPY = b"entropy of this process"
LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0])
SAMPLINGS = [
    Sampling(temperature=0.7, seed=11),
    Sampling(temperature=0.7, top_p=0.9, seed=11),
    Sampling(top_p=0.05, seed=11),
    Sampling(top_p=0.999, seed=11),
    Sampling(temperature=2.0, top_k=40, seed=11),
    Sampling(top_k=40, top_p=0.8, seed=11),
    Sampling(top_k=700, seed=11),
    Sampling(top_k=700, top_p=0.5, seed=11),
    Sampling(top_k=10**6, seed=11),
]


def draws(sampling: Sampling, count: int, *, logits: torch.Tensor = LOGITS) -> list[int | None]:
    """`count` tokens of one request, all from the same logits."""
    rows = [row([0], sampling=sampling, output_index=i) for i in range(count)]
    return Sampler(ENTROPY).sample(logits.expand(count, -1), rows)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.0),
        Sampling(temperature=0.0, top_p=0.5, top_k=3, seed=1),
        Sampling(temperature=1.0, top_k=1),
        Sampling(temperature=5.0, top_k=1, seed=3),
        Sampling(temperature=1.0, top_p=1e-9),
        Sampling(temperature=1.0, top_p=0.0),
        Sampling(temperature=1e-6),
        Sampling(temperature=1e-320),
        Sampling(temperature=5e-324, top_p=0.5),
    ],
)
def test_greedy_in_every_disguise_takes_the_likeliest_token(sampling: Sampling) -> None:
    assert draws(sampling, 50) == [0] * 50


@pytest.mark.parametrize("filtered", [False, True])
def test_many_draws_follow_the_distribution(filtered: bool) -> None:
    # top_k of the whole vocabulary filters nothing but takes the sorting path.
    sampling = Sampling(temperature=0.7, seed=11, top_k=5 if filtered else 0)
    count = 4000

    found = draws(sampling, count)

    for token, probability in enumerate((LOGITS / 0.7).softmax(-1).tolist()):
        deviation = math.sqrt(probability * (1 - probability) / count)
        assert abs(found.count(token) / count - probability) < 4 * deviation


def test_both_paths_keep_the_filters_exact() -> None:
    # Probabilities about .55 .20 .12 .07 .03 -> the fewest tokens that reach .7 are the first two.
    assert set(draws(Sampling(top_p=0.7, seed=1), 400)) == {0, 1}
    assert set(draws(Sampling(top_k=3, seed=1), 400)) == {0, 1, 2}
    # Among the first three the first two reach .8; top_p looks at what top_k left.
    assert set(draws(Sampling(top_k=3, top_p=0.8, seed=1), 400)) == {0, 1}


def test_a_seed_repeats_and_another_seed_differs() -> None:
    assert draws(Sampling(seed=5), 64) == draws(Sampling(seed=5), 64)
    assert draws(Sampling(seed=5), 64) != draws(Sampling(seed=6), 64)


def test_a_seeded_draw_does_not_depend_on_its_neighbours_or_the_process() -> None:
    seeded = Sampling(seed=5)
    rows = [
        row([0], sampling=Sampling(temperature=0.0)),
        row([0], sampling=Sampling(top_k=2, seed=9)),
        row([0], sampling=seeded, output_index=17, request_id="req_b"),
        row([0], sampling=Sampling()),
    ]

    alone = draws(seeded, 18)[17]
    batched = Sampler(b"another process").sample(LOGITS.expand(4, -1), rows)[2]

    assert batched == alone


def test_an_unseeded_request_continues_its_own_draws_and_no_other_does() -> None:
    def unseeded(request_id: str) -> list[Row]:
        return [
            row([0], sampling=Sampling(), output_index=i, request_id=request_id) for i in range(64)
        ]

    logits = LOGITS.expand(64, -1)
    first = Sampler(ENTROPY).sample(logits, unseeded("req_a"))

    assert Sampler(ENTROPY).sample(logits, unseeded("req_a")) == first
    assert Sampler(ENTROPY).sample(logits, unseeded("req_b")) != first
    assert Sampler(b"another process").sample(logits, unseeded("req_a")) != first


def test_equally_likely_tokens_stay_or_go_together() -> None:
    tied = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0])

    assert set(draws(Sampling(top_k=2, seed=1), 400, logits=tied)) == {0, 1, 2, 3}
    assert set(draws(Sampling(top_p=0.6, seed=1), 400, logits=tied)) == {0, 1, 2, 3}
    assert draws(Sampling(top_k=1, seed=1), 50, logits=tied.flip(0)) == [4] * 50


@pytest.mark.parametrize("vocab_size", [5, 64, 1000, 8200])
@pytest.mark.parametrize("spread", [0.5, 3.0])
@pytest.mark.parametrize("is_rounded", [False, True])
def test_draws_follow_the_plain_reference(vocab_size: int, spread: float, is_rounded: bool) -> None:
    random = np.random.default_rng(vocab_size)
    logits = random.normal(0, spread, vocab_size).astype(np.float32)
    if is_rounded:  # many ties, as a bfloat16 head makes them
        logits = np.round(logits * 8) / 8
    for sampling in SAMPLINGS:
        expected = naive_probabilities(logits, sampling)
        found = draws(sampling, 600, logits=torch.from_numpy(logits))

        assert (expected[found] > 0).all(), sampling
        # A test of chance with a fixed seed: the mean of a bounded number, within four deviations.
        values = random.random(vocab_size)
        mean = expected @ values
        deviation = np.sqrt(expected @ (values - mean) ** 2 / len(found))
        assert abs(values[found].mean() - mean) <= 4 * deviation + 1e-9, sampling


def test_all_that_stays_is_drawn_at_last() -> None:
    logits = torch.linspace(0, 1, 1000)
    for sampling in (Sampling(top_k=30, seed=1), Sampling(top_k=300, seed=1), Sampling(top_p=0.1)):
        kept = np.flatnonzero(naive_probabilities(logits.numpy(), sampling))

        assert set(draws(sampling, 6000, logits=logits)) == set(kept.tolist()), sampling


def test_a_row_draws_the_same_alone_and_in_a_mixed_batch() -> None:
    random = np.random.default_rng(0)
    logits = torch.from_numpy(random.normal(0, 3, (64, 8192)).astype(np.float32))
    rows = [
        row([0], sampling=replace(SAMPLINGS[i % len(SAMPLINGS)], seed=i), output_index=i)
        for i in range(64)
    ]

    alone = [Sampler(ENTROPY).sample(logits[i : i + 1], rows[i : i + 1])[0] for i in range(64)]

    assert Sampler(ENTROPY).sample(logits, rows) == alone


def test_logits_that_are_rounded_differently_seldom_change_a_draw() -> None:
    random = np.random.default_rng(1)
    exact = torch.from_numpy(random.normal(0, 3, (500, 4096)).astype(np.float32))
    rounded = exact + torch.from_numpy(random.normal(0, 0.01, exact.shape).astype(np.float32))
    rows = [row([0], sampling=Sampling(seed=5), output_index=i) for i in range(500)]

    first, second = (Sampler(ENTROPY).sample(logits, rows) for logits in (exact, rounded))

    # The distributions differ by about half of 0.01; no draw can have fewer changes than that.
    assert sum(a != b for a, b in zip(first, second, strict=True)) < 500 * 4 * 0.01


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_without_a_finite_largest_logit_has_no_token_and_others_have_theirs(
    bad: float,
) -> None:
    logits = LOGITS.repeat(3, 1)
    logits[1, 3] = bad
    for sampling in (Sampling(temperature=0.0), Sampling(), Sampling(top_p=0.9), Sampling(top_k=2)):
        rows = [row([0], sampling=sampling, output_index=i) for i in range(3)]
        first, second, third = Sampler(ENTROPY).sample(logits, rows)

        assert second is None
        assert [first] == Sampler(ENTROPY).sample(logits[:1], rows[:1])
        assert [third] == Sampler(ENTROPY).sample(logits[2:], rows[2:])


def test_a_token_of_probability_zero_is_no_fault_but_a_row_of_them_is() -> None:
    logits = torch.tensor([[-math.inf, 1.0, -math.inf], [-math.inf] * 3])

    assert Sampler(ENTROPY).sample(logits, [row([0], sampling=Sampling())] * 2) == [1, None]


def test_no_rows_give_no_tokens() -> None:
    assert Sampler(ENTROPY).sample(torch.empty(0, 5), []) == []
