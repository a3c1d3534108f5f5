"""The one rounding rule against exact fractions, and money as text."""

import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing.meters import Meter, Quantities
from billing.money import QUANTITY_MAX, RATE_PICO_MAX, amount_nanos, usd
from billing.price_cards import PriceCard
from billing.rating import rate, worst_case_nanos
from tests.billing.books import T3

quantities = st.integers(0, QUANTITY_MAX)
rates = st.integers(0, RATE_PICO_MAX)


@given(quantities, rates)
def test_an_amount_is_the_exact_product_rounded_half_up(quantity: int, rate_pico: int) -> None:
    exact = Fraction(quantity * rate_pico, 1000)

    amount = amount_nanos(quantity=quantity, rate_pico=rate_pico)

    assert exact - Fraction(1, 2) < amount <= exact + Fraction(1, 2)
    assert amount < 2**63


@pytest.mark.parametrize(
    ("quantity", "rate_pico", "expected"),
    [
        (2_000_000, 6_000_000, 12_000_000_000),  # B19: one-hour writes of a $3 model
        (1_000, 3_000, 3_000),  # B60: nothing rounds away
        (1, 499, 0),
        (1, 500, 1),
        (3, 62_500, 188),
        (0, 5_000_000, 0),
    ],
)
def test_amounts_by_hand(quantity: int, rate_pico: int, expected: int) -> None:
    assert amount_nanos(quantity=quantity, rate_pico=rate_pico) == expected


def test_b71_a_write_is_priced_once() -> None:
    card = PriceCard(
        id="big@1",
        model_id="big",
        version=1,
        effective_from_ms=0,
        rates={**T3.rates, Meter.INPUT: 5_000_000, Meter.CACHE_WRITE_5M: 6_250_000,
               Meter.OUTPUT: 25_000_000},
    )  # fmt: skip

    lines = rate(Quantities(input=6, cache_write_5m=159_217, output=2_745), card)

    assert [line.amount_nanos for line in lines] == [30_000, 995_106_250, 68_625_000]
    assert sum(line.amount_nanos for line in lines) == 1_063_761_250


def test_a_zero_quantity_has_no_line() -> None:
    assert [line.meter for line in rate(Quantities(input=1, output=0), T3)] == [Meter.INPUT]


@given(
    st.integers(0, 10_000), st.integers(0, 10_000), st.integers(0, 10_000), st.integers(0, 10_000),
    st.integers(0, 10_000), st.lists(rates, min_size=5, max_size=5),
)  # fmt: skip
def test_no_request_costs_more_than_its_worst_case(
    read: int, w1h: int, w5: int, plain: int, output: int, prices: list[int]
) -> None:
    used = Quantities(plain, read, w5, w1h, output)
    card = PriceCard("m@1", "m", 1, 0, dict(zip(Meter, prices, strict=True)))

    worst = worst_case_nanos(
        card, total_tokens=used.prompt, marked_tokens=read + w1h + w5, any_1h=w1h > 0,
        max_tokens=output,
    )  # fmt: skip

    assert sum(line.amount_nanos for line in rate(used, card)) <= worst


def test_a_short_write_that_is_dearer_than_a_long_one_is_the_worst_case() -> None:
    card = PriceCard("m@1", "m", 1, 0, {**T3.rates, Meter.CACHE_WRITE_5M: 9_000_000})

    worst = worst_case_nanos(
        card, total_tokens=1_000, marked_tokens=1_000, any_1h=True, max_tokens=0
    )

    assert worst >= 9_000_000


@pytest.mark.parametrize(
    ("nanos", "text"),
    [
        (0, "0.000000000"),
        (1, "0.000000001"),
        (-1, "-0.000000001"),
        (1_234_567_890, "1.234567890"),
        (-3_000_000_000, "-3.000000000"),
        (2**63 - 1, "9223372036.854775807"),
    ],
)
def test_b59_money_is_exact_text(nanos: int, text: str) -> None:
    assert usd(nanos) == text


@given(st.integers(-(2**63), 2**63 - 1))
def test_money_as_text_can_be_read_back(nanos: int) -> None:
    text = usd(nanos)

    assert re.fullmatch(r"-?\d+\.\d{9}", text)
    assert int(text.replace(".", "")) == nanos
