"""Dated price cards: read them from a file, publish them, find the one in force at a time."""

import hashlib
import json
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from importlib.resources import files
from pathlib import Path
from typing import Any, Never

from sqlalchemy import Connection, insert, select

from billing.errors import PriceCardChanged, PriceCardFileError, UnknownPrice
from billing.meters import Meter
from billing.money import RATE_PICO_MAX
from billing.tables import price_cards, price_rates

PICO_PER_USD_PER_MILLION = 1_000_000  # 1 USD a million tokens is 10^6 pico-dollars a token
DECIMAL = re.compile(r"\d+(\.\d+)?", re.ASCII)
CARD_FIELDS = {
    "model", "version", "effective_from", "usd_per_million_tokens", "times_input", "free",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class PriceCard:
    """The price of a token of each meter on a model, in force from a time on."""

    id: str
    model_id: str
    version: int
    effective_from_ms: int
    rates: dict[Meter, int]  # pico-dollars a token


def default_cards_path() -> Path:
    """Return the path of the price list that comes with the package."""
    return Path(str(files("billing").joinpath("price_cards.toml")))


def load_cards(path: Path) -> list[PriceCard]:
    """Read a price list. Raises PriceCardFileError, which names the fault."""
    try:
        with path.open("rb") as file:
            document = tomllib.load(file, parse_float=_refuse_float)
        cards = [_card(fields) for fields in document["card"]]
    except OSError as error:
        raise PriceCardFileError(path, f"cannot be read ({error.strerror})") from error
    except KeyError as error:
        raise PriceCardFileError(path, f"missing {error.args[0]}") from error
    except (TypeError, ValueError) as error:
        raise PriceCardFileError(path, str(error)) from error
    if not cards:
        raise PriceCardFileError(path, "it has no card")
    ids = [card.id for card in cards]
    if repeated := {card_id for card_id in ids if ids.count(card_id) > 1}:
        raise PriceCardFileError(path, f"two cards have one version: {', '.join(sorted(repeated))}")
    return cards


def publish(conn: Connection, cards: Sequence[PriceCard], now_ms: int) -> None:
    """Insert the cards that are new; publishing the same card again changes nothing.

    Raises PriceCardChanged if a published card would get other content.
    """
    known = {row.id: row.content_hash for row in conn.execute(select(price_cards))}
    for card in cards:
        hashed = content_hash(card)
        if card.id in known:
            if known[card.id] != hashed:
                raise PriceCardChanged(card.id)
            continue
        conn.execute(
            insert(price_cards).values(
                id=card.id,
                model_id=card.model_id,
                version=card.version,
                effective_from_ms=card.effective_from_ms,
                published_at_ms=now_ms,
                content_hash=hashed,
            )
        )
        conn.execute(
            insert(price_rates),
            [
                {"price_card_id": card.id, "meter": meter.value, "rate_pico": rate}
                for meter, rate in card.rates.items()
            ],
        )


def card_in_force(conn: Connection, model_id: str, at_ms: int) -> PriceCard:
    """Return the newest published version that is effective at `at_ms`.

    A card that is published after its effective date prices the holds that are opened from then on,
    so no past price changes. When it was published is kept and not compared: the clock may have
    stepped back since. Raises UnknownPrice: a model without a card is refused, never free.
    """
    card_id = conn.scalar(
        select(price_cards.c.id)
        .where(
            price_cards.c.model_id == model_id,
            price_cards.c.effective_from_ms <= at_ms,
        )
        .order_by(price_cards.c.version.desc())
        .limit(1)
    )
    if card_id is None:
        raise UnknownPrice(model_id)
    return card_by_id(conn, card_id)


def card_by_id(conn: Connection, price_card_id: str) -> PriceCard:
    """Return a published card; the id comes from a row that refers to it."""
    rows = conn.execute(
        select(price_cards, price_rates.c.meter, price_rates.c.rate_pico)
        .join(price_rates, price_rates.c.price_card_id == price_cards.c.id)
        .where(price_cards.c.id == price_card_id)
    ).all()
    return PriceCard(
        id=rows[0].id,
        model_id=rows[0].model_id,
        version=rows[0].version,
        effective_from_ms=rows[0].effective_from_ms,
        rates={Meter(row.meter): row.rate_pico for row in rows},
    )


def _card(fields: dict[str, Any]) -> PriceCard:
    if unknown := sorted(set(fields) - CARD_FIELDS):
        raise ValueError(f"unknown field: {unknown[0]}")
    model_id, version = fields["model"], fields["version"]
    if not isinstance(model_id, str) or not model_id:
        raise TypeError("model must be a name")
    if not isinstance(version, int) or version < 1:
        raise TypeError(f"version of {model_id} must be a whole number from 1")
    card_id = f"{model_id}@{version}"
    prices, multiples = fields["usd_per_million_tokens"], fields.get("times_input", {})
    rates = _rates(card_id, prices, multiples)
    _require_intended_price(card_id, rates, is_free=fields.get("free", False))
    return PriceCard(
        id=card_id,
        model_id=model_id,
        version=version,
        effective_from_ms=_moment_ms(card_id, fields["effective_from"]),
        rates=rates,
    )


def _require_intended_price(card_id: str, rates: dict[Meter, int], *, is_free: object) -> None:
    """Require `free = true` of a card without a price, and only of such a card."""
    if not isinstance(is_free, bool):
        raise TypeError(f"{card_id} free must be true or false")
    has_price = any(rates.values())
    if not has_price and not is_free:
        raise ValueError(f"{card_id} prices every meter at zero: write free = true if it is meant")
    if has_price and is_free:
        raise ValueError(f"{card_id} is free and has a price")


def _rates(card_id: str, prices: dict[str, Any], multiples: dict[str, Any]) -> dict[Meter, int]:
    """Return the five rates; each meter is priced in exactly one of the two ways."""
    meters = {meter.value for meter in Meter}
    if unknown := sorted((set(prices) | set(multiples)) - meters):
        raise ValueError(f"{card_id} prices an unknown meter: {unknown[0]}")
    if twice := sorted(set(prices) & set(multiples)):
        raise ValueError(f"{card_id} prices a meter twice: {twice[0]}")
    if missing := [meter for meter in Meter if meter not in prices and meter not in multiples]:
        raise ValueError(f"{card_id} has no price for {', '.join(missing)}")
    if Meter.INPUT not in prices:
        raise ValueError(f"{card_id} must price input in dollars")
    input_price = _number(card_id, Meter.INPUT, prices["input"])
    exact = {
        meter: _number(card_id, meter, prices[meter])
        if meter in prices
        else _number(card_id, meter, multiples[meter]) * input_price
        for meter in Meter
    }
    return {meter: _rate_pico(card_id, meter, price) for meter, price in exact.items()}


def _rate_pico(card_id: str, meter: Meter, usd_per_million: Fraction) -> int:
    rate = usd_per_million * PICO_PER_USD_PER_MILLION
    if rate.denominator != 1:
        raise ValueError(f"{card_id} {meter} is not a whole pico-dollar a token")
    if rate.numerator > RATE_PICO_MAX:
        raise ValueError(f"{card_id} {meter} is above {RATE_PICO_MAX} pico-dollars a token")
    return rate.numerator


def _number(card_id: str, meter: Meter, value: object) -> Fraction:
    """Return the exact value of a decimal string or a whole number."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise TypeError(f"{card_id} {meter} must be a decimal string or a whole number")
    if not DECIMAL.fullmatch(str(value)):
        raise ValueError(f"{card_id} {meter} is not a decimal number: {value}")
    return Fraction(value)


def _moment_ms(card_id: str, value: object) -> int:
    if not isinstance(value, datetime) or value.tzinfo is None:
        raise TypeError(f"{card_id} effective_from must be a date and time with an offset")
    return (value - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1)


def content_hash(card: PriceCard) -> str:
    """Return the hash of what a card prices, stored when it is published."""
    content = [card.model_id, card.version, card.effective_from_ms, sorted(card.rates.items())]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _refuse_float(literal: str) -> Never:
    raise ValueError(f"write {literal} as a string: a float is not exact")
