"""`kvmeter holds`: what stays open is listed, shown, and closed by hand with a reason."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from billing.database import Database, migrate
from billing.rows import as_json
from gateway.settings import Settings
from tests.billing.books import Books, engine_facts, make_books

Run = Callable[..., str]


@pytest.fixture
def books(data_dir: Path):
    url = Settings(data_dir=data_dir).ledger_url
    migrate(url)
    database = Database(url, now_ms=lambda: 0)
    yield make_books(database)
    database.close()


def test_an_open_hold_is_listed_shown_and_released(books: Books, run: Run) -> None:
    hold = books.open(amount_nanos=1_500_000_000)

    (listed,) = json.loads(run("holds", "list", "--json"))
    table = run("holds", "list")
    shown = json.loads(run("holds", "show", hold.request_id, "--json"))
    released = run("holds", "release", hold.request_id, "--reason", "lost", "--actor", "ada")

    assert (listed["request_id"], listed["amount_nanos"]) == (hold.request_id, "1500000000")
    assert "1.500000000" in table
    assert shown["owner_boot_id"] == hold.owner_boot_id
    assert shown["decision"] is None
    assert "does not answer" in shown["engine_record"]
    assert "0.000000000 USD charged" in released
    after = json.loads(run("holds", "show", hold.request_id, "--json"))["decision"]
    assert (after["decision"], after["actor"], after["reason"]) == ("released", "ada", "lost")
    assert json.loads(run("holds", "list", "--json")) == []
    assert "is not open" in run(
        "holds", "release", hold.request_id, "--reason", "again", fails=True
    )


def test_a_hold_is_settled_from_a_record_in_a_file(books: Books, run: Run, tmp_path: Path) -> None:
    hold = books.open()
    record = tmp_path / "record.json"
    facts = engine_facts(hold)
    wrong = replace(facts, output_tokens=10_000)
    settle = ("holds", "settle", hold.request_id, "--reason", "checked", "--record", str(record))

    record.write_text("{}")
    assert "Not an engine record" in run(*settle, fails=True)
    record.write_text(json.dumps(as_json(wrong)))
    assert "cannot be settled" in run(*settle, fails=True)
    record.write_text(json.dumps(as_json(facts)))
    settled = json.loads(run(*settle, "--json"))

    assert (settled["status"], settled["charged_nanos"]) == ("completed", "105000")
    books.assert_sound()


@pytest.mark.parametrize("arguments", [("show",), ("release", "--reason", "r")])
def test_an_unknown_hold_is_one_sentence(books: Books, run: Run, arguments: list[str]) -> None:
    command, *options = arguments

    assert "No hold for request: req_x" in run("holds", command, "req_x", *options, fails=True)


def test_closing_by_hand_needs_a_reason(books: Books, run: Run) -> None:
    hold = books.open()

    refusal = run("holds", "release", hold.request_id, "--reason", " ", fails=True)

    assert "reason" in refusal
    assert len(json.loads(run("holds", "list", "--json"))) == 1
