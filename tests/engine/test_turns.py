import random

import pytest

from engine.scheduling.turns import Turns


def test_a_turn_ends_when_its_tokens_are_used_up() -> None:
    turns = Turns(100)
    assert list(turns.order([b"a", b"b"])) == [b"a", b"b"]

    assert not turns.charge(b"a", 99)
    assert list(turns.order([b"a", b"b"])) == [b"a", b"b"]
    assert turns.charge(b"a", 1)

    assert list(turns.order([b"a", b"b"])) == [b"b", b"a"]


def test_whoever_took_too_much_has_less_next_time() -> None:
    turns = Turns(100)
    turns.order([b"a", b"b"])

    turns.charge(b"a", 130)
    turns.charge(b"b", 100)

    assert turns.charge(b"a", 70)


def test_who_joins_stands_behind_everyone() -> None:
    turns = Turns(100)
    turns.order([b"a", b"b"])

    assert list(turns.order([b"new", b"a", b"b"])) == [b"a", b"b", b"new"]


def test_who_left_has_saved_nothing_up_and_owes_nothing() -> None:
    turns = Turns(100)
    turns.order([b"a", b"b"])
    turns.charge(b"a", 150)

    assert list(turns.order([b"b"])) == [b"b"]
    assert list(turns.order([b"a", b"b"])) == [b"b", b"a"]
    assert not turns.charge(b"a", 99)


@pytest.mark.parametrize("seed", range(20))
def test_two_that_are_always_busy_are_served_alike(seed: int) -> None:
    chance = random.Random(seed)
    turns = Turns(100)
    served = {b"a": 0, b"b": 0}
    for _ in range(500):
        others = [name for name in (b"c", b"d") if chance.random() < 0.5]
        namespace = turns.order([*served, *others])[0]
        num_tokens = chance.randint(1, 100)
        turns.charge(namespace, num_tokens)
        if namespace in served:
            served[namespace] += num_tokens

        assert abs(served[b"a"] - served[b"b"]) < 300
