"""Dataclasses as rows: every field has its column, and what is stored is read back as it was."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import pytest
from sqlalchemy import Table

from billing.customers import ApiKey
from billing.facts import EngineFacts, GrantFact
from billing.holds import Hold
from billing.lease_costs import LeaseCost
from billing.meters import WritePoint
from billing.records import KEPT_ELSEWHERE, RequestRecord
from billing.rows import NAMES_OUTSIDE, as_json, from_json, to_json, to_row
from billing.tables import api_keys, holds, kv_records, lease_reports, requests
from tests.billing.books import Books, engine_facts

QUANTITIES = ["input", "cache_read", "cache_write_5m", "cache_write_1h", "output"]


@pytest.mark.parametrize(
    ("cls", "omitted", "table", "other_columns"),
    [
        (ApiKey, (), api_keys, ["secret_hash"]),
        (Hold, (), holds, ["account_id", "closed_at_ms"]),
        (RequestRecord, KEPT_ELSEWHERE, requests, ["id", *(f"{q}_tokens" for q in QUANTITIES)]),
        (EngineFacts, (), kv_records, ["request_id"]),
        (LeaseCost, (), lease_reports, ["entry_key", "reported_at_ms"]),
    ],
)
def test_the_fields_of_a_stored_dataclass_are_the_columns_of_its_table(
    cls: Any, omitted: Sequence[str], table: Table, other_columns: Sequence[str]
) -> None:
    names = {field.name for field in fields(cls)} - set(omitted)
    stored = {NAMES_OUTSIDE.get(name, name) for name in names}

    assert stored | set(other_columns) == set(table.columns.keys())
    assert not stored & set(other_columns)


def test_the_stored_form_is_the_one_that_existing_databases_have() -> None:
    hold = Books(None, "org_a").hold(  # type: ignore[arg-type]
        stream=True, writes=(WritePoint(8, "5m", "key-8"), WritePoint(9, "1h", "key-9"))
    )
    facts = engine_facts(hold, reads_by_tier={"host": 1, "device": 2}, grants=())

    assert to_row(hold)["stream"] == 1
    assert to_row(hold)["writes"] == (
        '[{"tokens":8,"ttl_class":"5m","entry_key":"key-8"},'
        '{"tokens":9,"ttl_class":"1h","entry_key":"key-9"}]'
    )
    assert to_row(facts)["reads_by_tier"] == '{"device": 2, "host": 1}'
    assert to_row(facts)["grants"] == "[]"


def test_lists_are_read_back_from_their_text() -> None:
    grants = (GrantFact(8, True, "refused", "quota"), GrantFact(9, False, "refreshed"))

    assert from_json(GrantFact, to_json(grants), column="grants") == grants


def test_plain_data_of_a_dataclass_reaches_into_its_lists() -> None:
    @dataclass
    class Outer:
        grants: tuple[GrantFact, ...]
        num: int

    assert as_json(Outer((GrantFact(8, True, "granted", lease_id="eng:0"),), 1)) == {
        "grants": [
            {
                "tokens": 8,
                "write": True,
                "outcome": "granted",
                "reason": None,
                "committed": False,
                "lease_id": "eng:0",
            }
        ],
        "num": 1,
    }
