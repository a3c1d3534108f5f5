"""The cache split: what is promised at admission and what is charged at settlement."""

import pytest

from billing.cache_split import Moment, cache_split, writes_billed
from billing.facts import GrantFact, RefusedWrite
from billing.meters import Quantities, WritePoint
from tests.billing.books import Books

WRITES = (WritePoint(4, "1h", "key-4"), WritePoint(8, "5m", "key-8"))
HOLD = Books(None, "org_a").hold(total_tokens=10, read_tokens=2, writes=WRITES)  # type: ignore[arg-type]
SHORT = GrantFact(4, True, "granted", committed=True)


@pytest.mark.parametrize(
    ("grant", "at_admission", "at_settlement"),
    [
        (GrantFact(8, True, "granted"), True, False),
        (GrantFact(8, True, "refreshed"), True, False),
        (GrantFact(8, True, "granted", committed=True), True, True),
        (GrantFact(8, True, "refreshed", committed=True), True, True),
        (GrantFact(8, True, "refused", "quota"), False, False),
        (GrantFact(8, True, "refused", "quota", committed=True), False, False),
        (GrantFact(8, False, "granted", committed=True), False, False),
        (None, False, False),
    ],
)
def test_a_write_is_promised_once_granted_and_charged_once_committed(
    grant: GrantFact | None, at_admission: bool, at_settlement: bool
) -> None:
    grants = () if grant is None else (grant,)

    assert (8 in writes_billed(grants, moment="admission")) is at_admission
    assert (8 in writes_billed(grants, moment="settlement")) is at_settlement


@pytest.mark.parametrize("moment", ["admission", "settlement"])
def test_a_refused_write_is_plain_input_at_both_moments(moment: Moment) -> None:
    cache = cache_split(HOLD, (SHORT, GrantFact(8, True, "refused", "quota")), moment=moment)

    assert cache.quantities == Quantities(input=6, cache_read=2, cache_write_1h=2)
    assert cache.writes == WRITES[:1]
    assert cache.refused == (RefusedWrite(8, "quota"),)


def test_what_was_granted_and_not_committed_is_told_as_a_write_and_charged_as_input() -> None:
    grants = (SHORT, GrantFact(8, True, "granted"))

    told = cache_split(HOLD, grants, moment="admission")
    charged = cache_split(HOLD, grants, moment="settlement")

    assert told.quantities == Quantities(2, cache_read=2, cache_write_1h=2, cache_write_5m=4)
    assert charged.quantities == Quantities(6, cache_read=2, cache_write_1h=2)
    assert told.refused == charged.refused == ()


def test_a_grant_for_a_read_is_no_write_and_no_refusal() -> None:
    cache = cache_split(HOLD, (GrantFact(8, False, "refused", "quota"),), moment="admission")

    assert (cache.writes, cache.refused) == ((), ())
