"""Rating: token quantities times a price card, and the worst case that a hold reserves. Pure."""

from dataclasses import dataclass

from billing.meters import Meter, Quantities
from billing.money import PICO_PER_NANO, amount_nanos, amounts_nanos_max
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
    """Return the most that a request can cost, the rounding of each line included.

    Each marked token is priced at its dearest outcome, and the whole output budget as used.
    `marked_tokens` is the length of the longest prefix under a marker, `any_1h` whether one of the
    markers asks for the 1-hour class: a card's 5-minute write may be the dearer one.
    """
    outcomes = [Meter.INPUT]
    if marked_tokens:
        outcomes += [Meter.CACHE_READ, Meter.CACHE_WRITE_5M]
        outcomes += [Meter.CACHE_WRITE_1H] if any_1h else []
    dearest_pico = max(card.rates[meter] for meter in outcomes)
    plain_tokens = total_tokens - marked_tokens
    prompt_pico = marked_tokens * dearest_pico + plain_tokens * card.rates[Meter.INPUT]
    num_rounded = sum(card.rates[meter] % PICO_PER_NANO != 0 for meter in outcomes)
    prompt_nanos = amounts_nanos_max(total_pico=prompt_pico, num_rounded=num_rounded)
    return prompt_nanos + _line(Meter.OUTPUT, max_tokens, card).amount_nanos


def _line(meter: Meter, quantity: int, card: PriceCard) -> PricedLine:
    rate_pico = card.rates[meter]
    amount = amount_nanos(quantity=quantity, rate_pico=rate_pico)
    return PricedLine(meter, quantity, rate_pico, amount)
