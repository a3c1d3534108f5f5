"""Guessing is slow for an address; whoever has a key that works does not notice."""

import pytest

from gateway.errors import TooManyFailedKeys
from gateway.http import failed_keys
from gateway.http.failed_keys import FAILURES_ALLOWED, FORGOTTEN_AFTER_MS, FailedKeys

NOW_MS = 1_772_366_400_000


def guess(keys: FailedKeys, count: int, *, now_ms: int = NOW_MS, network: str = "here") -> int:
    """Guess so many times; return how many keys were looked up."""
    looked_up = 0
    for number in range(count):
        secret = f"guess-{now_ms}-{number}"
        try:
            keys.begin(network, secret, now_ms=now_ms)
        except TooManyFailedKeys:
            continue
        keys.failed(secret)
        looked_up += 1
    return looked_up


def test_an_address_may_guess_at_a_slow_rate_only() -> None:
    keys = FailedKeys()

    assert guess(keys, 1_000) == FAILURES_ALLOWED
    assert guess(keys, 1_000, now_ms=NOW_MS + 10 * FORGOTTEN_AFTER_MS) == 10
    assert guess(keys, 1_000, now_ms=NOW_MS + 1_000 * FORGOTTEN_AFTER_MS) == FAILURES_ALLOWED


def test_the_refusal_says_when_to_come_again() -> None:
    keys = FailedKeys()
    guess(keys, FAILURES_ALLOWED)

    with pytest.raises(TooManyFailedKeys) as refused:
        keys.begin("here", "guess", now_ms=NOW_MS)

    assert refused.value.headers == {"retry-after": "2"}
    assert guess(keys, 1, now_ms=NOW_MS + 2_000) == 1


def test_other_addresses_are_not_slowed() -> None:
    keys = FailedKeys()
    guess(keys, 1_000)

    assert guess(keys, 1, network="there") == 1


def test_a_key_that_has_worked_is_served_from_a_guessing_address() -> None:
    keys = FailedKeys()
    keys.begin("elsewhere", "good", now_ms=NOW_MS)
    keys.succeeded("elsewhere", "good")
    guess(keys, 1_000)

    keys.begin("here", "good", now_ms=NOW_MS)
    keys.failed("good")  # it has been revoked
    with pytest.raises(TooManyFailedKeys):
        keys.begin("here", "good", now_ms=NOW_MS)


def test_valid_keys_are_no_failures_however_many_are_new() -> None:
    keys = FailedKeys()
    for number in range(10 * FAILURES_ALLOWED):
        keys.begin("here", f"good-{number}", now_ms=NOW_MS)
        keys.succeeded("here", f"good-{number}")


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failed_keys, "MAX_ADDRESSES", 2)
    keys = FailedKeys()
    for network in ("a", "b", "c"):
        guess(keys, FAILURES_ALLOWED, network=network)

    assert [guess(keys, 1, network=network) for network in ("b", "c", "a")] == [0, 0, 1]
