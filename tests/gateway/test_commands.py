"""The operator's commands: what they print, and one sentence for what they refuse."""

import json
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from billing.booking import last_booked_at_ms
from billing.customers import find_caller
from billing.database import Database
from gateway.commands import app
from gateway.settings import Settings

Run = Callable[..., str]


@pytest.fixture
def migrated(run: Run) -> Run:
    run("migrate")
    return run


def test_a_key_of_a_new_workspace_is_known_by_its_secret(migrated: Run, data_dir: Path) -> None:
    organization = migrated("organizations", "create", "--name", "acme").strip()
    workspace = migrated("workspaces", "create", "--organization", organization).strip()
    key = json.loads(
        migrated(
            "keys", "create", "--organization", organization, "--workspace", workspace, "--json"
        )
    )

    database = Database(Settings(data_dir=data_dir).ledger_url, now_ms=lambda: 0)
    caller = database.read_now(lambda conn: find_caller(conn, key["secret"]))
    database.close()

    assert key.keys() == {"id", "secret"}
    assert caller is not None
    assert caller.key_id == key["id"]
    assert caller.workspace_id == workspace
    assert key["secret"] not in migrated("keys", "list")
    assert key["id"] in migrated("keys", "list", "--json")


def test_a_revoked_key_stays_listed(migrated: Run) -> None:
    organization = migrated("organizations", "create").strip()
    key = json.loads(migrated("keys", "create", "--organization", organization, "--json"))

    migrated("keys", "revoke", key["id"])

    (listed,) = json.loads(migrated("keys", "list", "--json"))
    assert listed["id"] == key["id"]
    assert listed["revoked_at_ms"] is not None


def test_a_top_up_is_in_the_books(migrated: Run) -> None:
    organization = migrated("organizations", "create", "--prepaid").strip()

    migrated("organizations", "top-up", organization, "--usd", "5.00")

    assert "no problems" in migrated("ledger", "verify")


def test_the_same_top_up_id_twice_is_one_top_up(migrated: Run) -> None:
    organization = migrated("organizations", "create", "--prepaid").strip()
    top_up = ("organizations", "top-up", organization, "--usd", "5.00")

    first, second = (
        json.loads(migrated(*top_up, "--id", "invoice-17", "--json")) for _ in range(2)
    )
    made = json.loads(migrated(*top_up, "--json"))

    assert (first["id"], first["repeated"], second["repeated"]) == ("invoice-17", False, True)
    assert second["balance_nanos"] == "5000000000"
    assert "booked before" in migrated(*top_up, "--id", made["id"])
    assert made["balance_nanos"] == "10000000000"
    conflict = migrated(*top_up[:-1], "6", "--id", "invoice-17", fails=True)
    assert "used before with other values: invoice-17" in conflict


def test_a_postpaid_organization_cannot_be_topped_up(migrated: Run) -> None:
    organization = migrated("organizations", "create").strip()

    refusal = migrated("organizations", "top-up", organization, "--usd", "5", fails=True)

    assert "postpaid" in refusal
    assert organization in refusal


def test_verify_names_a_damaged_schema_and_goes_on(migrated: Run, data_dir: Path) -> None:
    migrated("organizations", "create")
    connection = sqlite3.connect(data_dir / "kvmeter.sqlite3")
    connection.execute("DROP TRIGGER transfers_no_update")
    connection.execute("UPDATE accounts SET credits_posted_nanos = 1 WHERE id = 'revenue:input'")
    connection.commit()
    connection.close()

    command = [sys.executable, "-m", "gateway.commands", "ledger", "verify", "--json"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)

    assert (found.returncode, found.stderr) == (1, "")
    problems = json.loads(found.stdout)["problems"]
    assert "The schema's transfers_no_update is missing, changed or switched off." in problems
    assert "The trial balance is not zero: 1." in problems
    assert "transfers_no_update" in migrated("keys", "list", fails=True)


def test_a_report_of_a_time_that_has_passed_closes_it(migrated: Run, data_dir: Path) -> None:
    url = Settings(data_dir=data_dir).ledger_url
    database = Database(url, now_ms=lambda: 0)

    migrated("report", "usage", "--until", "2020-01-01")
    migrated("report", "usage", "--until", "2999-01-01")

    assert database.read_now(last_booked_at_ms) == 1_577_836_800_000
    database.close()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("workspaces", "create", "--organization", "org_x"), "org_x"),
        (("keys", "create", "--organization", "org_x"), "org_x"),
        (("keys", "revoke", "key_x"), "key_x"),
        (("organizations", "top-up", "org_x", "--usd", "1"), "org_x"),
        (("organizations", "top-up", "org_x", "--usd", "much"), "much"),
        (("organizations", "top-up", "org_x", "--usd", "-1"), "-1"),
        (("organizations", "top-up", "org_x", "--usd", "0.0000000001"), "0.0000000001"),
        (("organizations", "top-up", "org_x", "--usd", "1e20"), "1e20"),
        (("organizations", "top-up", "org_x", "--usd", "1e999999999"), "1e999999999"),
        (("organizations", "top-up", "org_x", "--usd", "1", "--id", "no spaces"), "no spaces"),
        (("organizations", "create", "--name", "\udcff"), "UTF-8"),
        (("report", "usage", "--since", "yesterday"), "yesterday"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(
    migrated: Run, arguments: tuple[str, ...], word: str
) -> None:
    assert word in migrated(*arguments, fails=True)


@pytest.mark.parametrize("arguments", [("keys", "list"), ("ledger", "verify"), ("report", "usage")])
def test_a_database_without_schema_names_the_cure(run: Run, arguments: tuple[str, ...]) -> None:
    assert "kvmeter migrate" in run(*arguments, fails=True)


def test_a_setting_that_makes_no_sense_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVMETER_CACHE_MIN_TOKENS", "few")

    assert "KVMETER_CACHE_MIN_TOKENS" in run("keys", "list", fails=True)


def test_an_engine_address_that_is_none_is_named(
    migrated: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PORT", "0")
    monkeypatch.setenv("KVMETER_ENGINE_URL", "carrier-pigeon")
    # It would leave this process's logging behind on a stream that ends with this test.
    monkeypatch.setattr("gateway.commands.gateway.configure_logging", lambda **_: None)

    assert "carrier-pigeon" in migrated("gateway", fails=True)


def test_an_empty_report_is_a_table_and_a_list(migrated: Run) -> None:
    assert json.loads(migrated("report", "usage", "--json")) == []
    assert "cache_write_1h" in migrated("report", "usage")
    assert json.loads(migrated("report", "pins", "--json")) == []
    assert "contended block-s" in migrated("report", "pins")


def commands(prefix: tuple[str, ...] = (), group: typer.Typer = app) -> list[tuple[str, ...]]:
    """Every command, as the words that name it."""
    named = [
        (*prefix, info.name or info.callback.__name__)
        for info in group.registered_commands
        if info.callback is not None
    ]
    for inner in group.registered_groups:
        assert inner.typer_instance is not None
        named += commands((*prefix, str(inner.name)), inner.typer_instance)
    return named


def test_the_engines_help_is_the_engines_own() -> None:
    command = [sys.executable, "-m", "gateway.commands", "engine", "--help"]

    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert "--max-num-batched-tokens" in shown
    assert "--data-dir" in shown


# `kvmeter engine` becomes another process, which this one must not.
@pytest.mark.parametrize("command", sorted(set(commands()) - {("engine",)}), ids=" ".join)
def test_every_command_takes_help_and_a_data_folder(run: Run, command: tuple[str, ...]) -> None:
    shown = run(*command, "--help")

    assert "--data-dir" in shown
    assert "DATA_DIR" in shown
