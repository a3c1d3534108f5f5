"""Price cards: each is, to its last rate, what was published."""

from collections.abc import Iterator
from typing import Any

from sqlalchemy import Connection, Row, select

from billing.meters import Meter
from billing.price_cards import PriceCard, content_hash
from billing.scan import each, scan
from billing.tables import price_cards, price_rates


def price_card_problems(conn: Connection) -> Iterator[str]:
    """A card has a rate for each meter, and the hash of its content."""

    def problems(row: Row[Any]) -> Iterator[str]:
        rates = conn.execute(select(price_rates).where(price_rates.c.price_card_id == row.id))
        card = PriceCard(
            id=row.id,
            model_id=row.model_id,
            version=row.version,
            effective_from_ms=row.effective_from_ms,
            rates={Meter(rate.meter): rate.rate_pico for rate in rates},
        )
        if set(card.rates) != set(Meter):
            yield f"Price card {row.id} has {len(card.rates)} rates of {len(Meter)}."
        elif content_hash(card) != row.content_hash:
            yield f"Price card {row.id} has other content than was published."

    yield from each(scan(conn, select(price_cards)), lambda row: f"Price card {row.id}", problems)
