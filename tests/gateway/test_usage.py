"""The numbers between engine, billing and wire."""

from dataclasses import fields

from billing.facts import EngineFacts, GrantFact
from engine.client import EngineRecord, Grant
from gateway.requests.usage import bill_up_to, engine_facts

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
