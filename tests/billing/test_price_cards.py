"""Price cards: read exactly or refused, published once, and never changed for the past."""

from pathlib import Path

import pytest

from billing.database import Database
from billing.errors import PriceCardChanged, PriceCardFileError, UnknownPrice
from billing.meters import Meter
from billing.price_cards import PriceCard, card_in_force, default_cards_path, load_cards, publish

CARD = """
[[card]]
model = "tiny"
version = 1
effective_from = 2026-01-01T00:00:00Z
[card.usd_per_million_tokens]
input = "0.04"
output = 5
[card.times_input]
cache_read = "0.1"
cache_write_5m = "1.25"
cache_write_1h = "2"
"""


def load(tmp_path: Path, text: str) -> list[PriceCard]:
    path = tmp_path / "cards.toml"
    path.write_text(text)
    return load_cards(path)


def test_the_list_price_of_the_default_model() -> None:
    (card,) = load_cards(default_cards_path())

    assert card.model_id == "smollm2-135m-instruct"
    assert card.rates == {
        Meter.INPUT: 1_000_000,
        Meter.CACHE_READ: 100_000,
        Meter.CACHE_WRITE_5M: 1_250_000,
        Meter.CACHE_WRITE_1H: 2_000_000,
        Meter.OUTPUT: 5_000_000,
    }


def test_a_card_is_read_exactly(tmp_path: Path) -> None:
    (card,) = load(tmp_path, CARD)

    assert card.effective_from_ms == 1_767_225_600_000
    assert list(card.rates.values()) == [40_000, 4_000, 50_000, 80_000, 5_000_000]


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('model = "tiny"', "model = 7", "model must be a name"),
        ('model = "tiny"', 'model = ""', "model must be a name"),
        ('input = "0.04"', "", "tiny@1 has no price for input"),
        (
            'input = "0.04"\noutput = 5\n[card.times_input]\n',
            'output = 5\n[card.times_input]\ninput = "1"\n',
            "tiny@1 must price input in dollars",
        ),
        ('cache_write_1h = "2"', "", "tiny@1 has no price for cache_write_1h"),  # B12
        ('cache_read = "0.1"', "", "tiny@1 has no price for cache_read"),
        ("output = 5", "output = 5.5", "write 5.5 as a string"),
        ("output = 5", 'output = "5e1"', "tiny@1 output is not a decimal number: 5e1"),
        ("output = 5", 'output = "-5"', "not a decimal number"),
        ("output = 5", "output = -5", "not a decimal number"),
        ("output = 5", "output = true", "must be a decimal string or a whole number"),
        ("output = 5", 'output = "5"\nspeech = "1"', "unknown meter: speech"),
        ('"0.04"', '"0.0000001"', "not a whole pico-dollar"),
        ('"0.04"', '"3000"', "above 2147483647"),
        ('cache_read = "0.1"', 'cache_read = "0.1"\noutput = "2"', "prices a meter twice: output"),
        ("2026-01-01T00:00:00Z", "2026-01-01T00:00:00", "with an offset"),
        ("version = 1", "", "missing version"),
        ("version = 1", "version = 0", "whole number from 1"),
        ('model = "tiny"', 'model = "tiny"\ncolour = 1', "unknown field: colour"),
        ("[[card]]", "[[card", "cards.toml"),  # B56: a broken file
        ("version = 1", "version = 1\nfree = true", "tiny@1 is free and has a price"),
        ("version = 1", "version = 1\nfree = 1", "free must be true or false"),
        ('"0.04"\noutput = 5', '"0"\noutput = 0', "tiny@1 prices every meter at zero"),
    ],
)
def test_a_card_that_is_not_whole_is_refused(
    tmp_path: Path, old: str, new: str, problem: str
) -> None:
    with pytest.raises(PriceCardFileError, match=problem):
        load(tmp_path, CARD.replace(old, new))


def test_a_list_without_a_card_is_refused(tmp_path: Path) -> None:
    for text in ("card = []", ""):
        with pytest.raises(PriceCardFileError, match=r"has no card|missing card"):
            load(tmp_path, text)


def test_a_card_may_be_free_if_it_says_so(tmp_path: Path) -> None:
    free = CARD.replace('"0.04"\noutput = 5', '"0"\noutput = 0')

    (card,) = load(tmp_path, free.replace("version = 1", "version = 1\nfree = true"))

    assert set(card.rates.values()) == {0}


def test_a_missing_file_and_a_repeated_version_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PriceCardFileError, match="cannot be read"):
        load_cards(tmp_path / "nothing.toml")
    with pytest.raises(PriceCardFileError, match="two cards have one version: tiny@1"):
        load(tmp_path, CARD + CARD)


def test_b56_a_model_without_a_card_is_refused(database: Database) -> None:
    with pytest.raises(UnknownPrice, match="no-such-model"):
        database.read_now(lambda conn: card_in_force(conn, "no-such-model", 0))


def test_b57_a_new_version_counts_from_its_date_and_leaves_the_past_alone(
    database: Database, tmp_path: Path
) -> None:
    (first,) = load(tmp_path, CARD)
    dearer = CARD.replace("version = 1", "version = 2").replace('"0.04"', '"0.08"')
    (second,) = load(tmp_path, dearer.replace("2026-01-01", "2026-02-01"))
    start_ms, later_ms = first.effective_from_ms, second.effective_from_ms

    database.write_now(lambda conn: publish(conn, [first], start_ms))
    database.write_now(lambda conn: publish(conn, [first, second], later_ms - 10))

    def version_at(at_ms: int) -> int:
        return database.read_now(lambda conn: card_in_force(conn, "tiny", at_ms)).version

    assert [version_at(at) for at in (start_ms, later_ms - 1, later_ms)] == [1, 1, 2]


def test_a_published_card_is_in_force_whatever_clock_it_was_published_by(
    database: Database, tmp_path: Path
) -> None:
    (card,) = load(tmp_path, CARD)
    start_ms = card.effective_from_ms
    database.write_now(lambda conn: publish(conn, [card], start_ms + 3_600_000))

    assert database.read_now(lambda conn: card_in_force(conn, "tiny", start_ms)) == card
    with pytest.raises(UnknownPrice):
        database.read_now(lambda conn: card_in_force(conn, "tiny", start_ms - 1))


def test_publishing_again_changes_nothing_and_an_edited_card_is_refused(
    database: Database, tmp_path: Path
) -> None:
    (card,) = load(tmp_path, CARD)
    (edited,) = load(tmp_path, CARD.replace('"2"', '"3"'))
    at_ms = card.effective_from_ms
    database.write_now(lambda conn: publish(conn, [card], at_ms))
    database.write_now(lambda conn: publish(conn, [card], at_ms))

    with pytest.raises(PriceCardChanged, match="tiny@1"):
        database.write_now(lambda conn: publish(conn, [edited], at_ms))

    assert database.read_now(lambda conn: card_in_force(conn, "tiny", at_ms)) == card
