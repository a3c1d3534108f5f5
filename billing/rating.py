"""Rating: token quantities times a price card, and the worst case that a hold reserves. Pure."""

from dataclasses import dataclass

from billing.meters import Meter, Quantities
from billing.money import amount_nanos
from billing.price_cards import PriceCard


@dataclass(frozen=True, slots=True)
class PricedLine:
    """The quantity of one meter, its rate and the amount."""

    meter: Meter
    quantity: int
    rate_pico: int
    amount_nanos: int


def rate(quantities: Quantities, card: PriceCard) -> list[PricedLine]:
    """Return one line for each meter with a quantity above zero; each is rounded once."""
    return [
        _line(meter, quantities.of(meter), card) for meter in Meter if quantities.of(meter) != 0
    ]


def worst_case_nanos(
    card: PriceCard, *, total_tokens: int, marked_tokens: int, any_1h: bool, max_tokens: int
) -> int:
    """Return the most that a request can cost, up to rounding.

    Each marked token is priced at its dearest outcome (written, read, or plain input), and the
    whole output budget as used. `marked_tokens` is the length of the longest prefix under a marker.
    The true cost can be up to two nano-dollars higher, because each line is rounded; it is settled
    in full all the same.
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
