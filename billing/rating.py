"""Quantities times a price card: priced lines, and the worst case that a hold reserves. Pure."""

from dataclasses import dataclass

from billing.meters import Meter, Quantities
from billing.money import amount_nanos
from billing.price_cards import PriceCard


@dataclass(frozen=True, slots=True)
class PricedLine:
    """What was counted on one meter, at which rate, and what that comes to."""

    meter: Meter
    quantity: int
    rate_pico: int
    amount_nanos: int


def rate(quantities: Quantities, card: PriceCard) -> list[PricedLine]:
    """One line a meter, rounded once; a zero quantity has no line."""
    return [
        _line(meter, quantities.of(meter), card) for meter in Meter if quantities.of(meter) != 0
    ]


def worst_case_nanos(
    card: PriceCard, *, total_tokens: int, marked_tokens: int, any_1h: bool, max_tokens: int
) -> int:
    """The most a request can cost: every marked token written or refused, every output token used.

    `marked_tokens` is the length of the longest prefix under a marker. The true cost can be above
    by the rounding of its lines, at most two nano-dollars; it is settled in full all the same.
    """
    write = Meter.CACHE_WRITE_1H if any_1h else Meter.CACHE_WRITE_5M
    dearest = max((write, Meter.INPUT, Meter.CACHE_READ), key=card.rates.__getitem__)
    parts = (
        (dearest, marked_tokens),
        (Meter.INPUT, total_tokens - marked_tokens),
        (Meter.OUTPUT, max_tokens),
    )
    return sum(_line(meter, quantity, card).amount_nanos for meter, quantity in parts)


def _line(meter: Meter, quantity: int, card: PriceCard) -> PricedLine:
    rate_pico = card.rates[meter]
    amount = amount_nanos(quantity=quantity, rate_pico=rate_pico)
    return PricedLine(meter, quantity, rate_pico, amount)
