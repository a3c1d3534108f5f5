"""What must agree for every request: the wire, the record, the postings, the engine's facts."""

from typing import Any

from billing.meters import Meter
from tests.gateway.stack import RATES, Stack
from tests.gateway.talk import split_of_usage


def assert_books_agree(
    stack: Stack, request_id: str, usage: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Check a request that has ended, against the usage its client saw if it saw one.

    Returns the record.
    """
    record = stack.record(request_id)
    assert record["status"] != "in_progress"
    if usage is not None:
        assert record["usage"] == usage
    _assert_postings(record)
    _assert_engine_facts(record)
    return record


def _assert_postings(record: dict[str, Any]) -> None:
    """One posting for each meter that counted, at the card's rate, rounded once."""
    split = split_of_usage(record["usage"])
    counted = {
        Meter.INPUT: split.input,
        Meter.CACHE_READ: split.read,
        Meter.CACHE_WRITE_5M: split.w5,
        Meter.CACHE_WRITE_1H: split.w1h,
        Meter.OUTPUT: record["usage"]["output_tokens"],
    }
    expected = {
        meter.value: {
            "meter": meter.value,
            "quantity": str(quantity),
            "rate_pico": str(RATES[meter]),
            "amount_nanos": str((quantity * RATES[meter] + 500) // 1000),
        }
        for meter, quantity in counted.items()
        if quantity
    }
    assert {posting["meter"]: posting for posting in record["postings"]} == expected
    total_nanos = sum(int(posting["amount_nanos"]) for posting in record["postings"])
    assert record["charged_nanos"] == str(total_nanos)


def _assert_engine_facts(record: dict[str, Any]) -> None:
    """The four facts add up to the prompt, and a billed read is what was promised."""
    engine = record["engine"]
    if engine is None:
        assert record["status"] == "released"
        return
    read = engine["tokens_reused_promised"] + engine["tokens_read_recomputed"]
    rest = engine["tokens_reused_gift"] + engine["tokens_computed"]
    assert read + rest == engine["prompt_tokens"]
    if record["postings"]:
        split = split_of_usage(record["usage"])
        assert split.prompt == engine["prompt_tokens"]
        assert split.read == read
        assert record["usage"]["output_tokens"] == engine["output_tokens"]
