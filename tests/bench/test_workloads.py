"""Workloads are the same on every machine, and as long as they say."""

import random

import pytest
from tokenizers import Tokenizer

from bench.workloads import DRAWN, draw, load, words
from tests.models import default_model_dir

ALL = (*DRAWN, "w1", "w2", "w3")


@pytest.mark.parametrize("name", DRAWN)
def test_a_committed_list_is_what_its_seed_draws(name: str) -> None:
    assert load(name) == draw(name)


@pytest.mark.parametrize("name", ALL)
def test_prompts_come_from_the_seed_and_have_their_length(name: str) -> None:
    workload = load(name)

    for number, job in enumerate(workload.jobs):
        prompt = workload.prompt(number)
        assert len(prompt) == 4 * job.prompt_tokens
        assert prompt == load(name).prompt(number)
        assert prompt != workload.prompt(number, salt="another run")


def test_a_word_is_a_token() -> None:
    tokenizer = Tokenizer.from_file(str(default_model_dir() / "tokenizer.json"))

    text = words(random.Random(1), 500)

    assert len(tokenizer.encode(text, add_special_tokens=False).ids) == 500


def test_the_drawn_lists_have_the_means_that_they_name() -> None:
    def means(name: str) -> tuple[float, float]:
        jobs = load(name).jobs
        return (
            sum(job.prompt_tokens for job in jobs) / len(jobs),
            sum(job.output_tokens for job in jobs) / len(jobs),
        )

    assert means("sharegpt") == (pytest.approx(148, rel=0.1), pytest.approx(298, rel=0.1))
    assert means("exponential") == (512, pytest.approx(128, rel=0.02))
    assert means("uniform") == (148, pytest.approx(256.5, rel=0.01))


def test_w1_asks_for_the_3456_tokens_that_the_peers_were_asked_for() -> None:
    w1 = load("w1")

    assert (len(w1.jobs), w1.output_tokens) == (64, 3_456)
    assert max(job.output_tokens for job in w1.jobs) == w1.max_tokens


def test_a_quick_workload_says_that_it_is_one() -> None:
    quick = load("w1").first(4, shrink=8)

    assert len(quick.jobs) == 4
    assert quick.lengths.endswith("first 4, lengths / 8")
    assert load("w1").first(64) == load("w1")
