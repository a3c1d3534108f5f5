"""The sampler's laws: what is greedy, what repeats, and what the draws look like together."""

import math

import pytest
import torch

from engine.compute.sampler import Sampler
from engine.plan import Row
from engine.protocol import Sampling
from tests.engine.rows import row

ENTROPY = b"entropy of this process"
LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0])


def draws(sampling: Sampling, count: int, *, logits: torch.Tensor = LOGITS) -> list[int]:
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


def test_no_rows_give_no_tokens() -> None:
    assert Sampler(ENTROPY).sample(torch.empty(0, 5), []) == []
