"""The numbers between engine, billing and wire."""

import json
from dataclasses import fields
from typing import Any, get_args

import pytest

from billing.cache_split import CacheSplit
from billing.facts import EngineFacts, FinishReason, GrantFact, GrantOutcome, RefusedWrite
from billing.lease_costs import LeaseCost, ReportReason
from billing.meters import Quantities
from billing.records import RequestRecord
from engine import protocol
from engine.client import EngineRecord, Grant, LeaseReport
from gateway.requests.usage import bill_up_to, cache_header, engine_facts
from gateway.routes.request_records import record_body

RECORD = EngineRecord(
    request_id="req_1",
    engine_boot_id="eng_1",
    prompt_tokens=100,
    read_tokens=40,
    tokens_reused_promised=30,
    tokens_reused_gift=0,
    tokens_read_recomputed=10,
    tokens_computed=60,
    grants=(Grant(80, write=True, outcome="refused", reason="quota"),),
    output_tokens=7,
    overrun_tokens=1,
    finish_reason="max_tokens",
    tokens_recomputed_preemption=3,
    num_preemptions=2,
    reads_by_tier={"gpu": 30},
    queued_ms=5,
)


def test_what_the_engine_made_after_a_stop_string_is_overrun():
    billed = bill_up_to(RECORD, 4)

    assert (billed.output_tokens, billed.overrun_tokens) == (4, 4)


def test_an_engine_that_stopped_in_time_is_believed():
    assert bill_up_to(RECORD, 7) == bill_up_to(RECORD, 9) == RECORD


def test_every_fact_of_the_record_reaches_billing():
    facts = engine_facts(RECORD)

    for name in (field.name for field in fields(EngineFacts) if field.name != "grants"):
        assert getattr(facts, name) == getattr(RECORD, name)
    assert facts.grants == (GrantFact(80, write=True, outcome="refused", reason="quota"),)


def test_a_customer_sees_the_engine_record_in_this_shape():
    record = RequestRecord(
        request_id="req_1",
        organization_id="org_1",
        workspace_id="wrk_1",
        key_id="key_1",
        model_id="word-model",
        requested_model="word-model",
        price_card_id="word-model@1",
        stream=False,
        started_at_ms=0,
        status="completed",
        prompt_tokens=100,
        engine=engine_facts(RECORD),
    )

    assert json.dumps(record_body(record)["engine"]) == (
        '{"tokens_reused_promised": 30, "tokens_reused_gift": 0, "tokens_read_recomputed": 10,'
        ' "tokens_computed": 60, "prompt_tokens": 100, "output_tokens": 7, "overrun_tokens": 1,'
        ' "tokens_recomputed_preemption": 3, "num_preemptions": 2, "reads_by_tier": {"gpu": 30},'
        ' "grants": [{"tokens": 80, "write": true, "outcome": "refused", "reason": "quota",'
        ' "committed": false, "lease_id": null}], "finish_reason": "max_tokens", "queued_ms": 5,'
        ' "boot_id": "eng_1"}'
    )


@pytest.mark.parametrize(
    ("ours", "the_engines", "not_stored"),
    [
        (EngineFacts, EngineRecord, {"request_id", "read_tokens"}),
        (GrantFact, Grant, set()),
        (LeaseCost, LeaseReport, set()),
    ],
)
def test_billing_has_every_field_that_the_engine_reports(
    ours: Any, the_engines: Any, not_stored: set[str]
):
    names = {field.name for field in fields(ours)}

    assert names | not_stored == {field.name for field in fields(the_engines)}
    assert not names & not_stored


def test_billing_has_every_word_that_the_engine_reports():
    assert set(get_args(FinishReason)) == set(get_args(protocol.FinishReason))
    assert set(get_args(GrantOutcome)) == set(get_args(protocol.GrantOutcome))
    assert set(get_args(ReportReason)) == set(get_args(protocol.ReportReason))


def test_the_header_names_each_refused_write():
    quantities = Quantities(input=1, cache_read=2, cache_write_5m=3, cache_write_1h=4)
    refused = (RefusedWrite(80, "quota"), RefusedWrite(96, "capacity"))

    plain = cache_header(CacheSplit(quantities, writes=(), refused=()))
    with_refusals = cache_header(CacheSplit(quantities, writes=(), refused=refused))

    assert plain == "read=2; write_5m=3; write_1h=4"
    assert with_refusals == f"{plain}; refused=quota@80,capacity@96"
