"""Lease reports on their way from the engine to the ledger, and what asks for leases to persist."""

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection

from billing.customers import find_caller
from billing.lease_costs import pin_costs
from billing.price_cards import PriceCard, publish
from billing.verification import verify
from engine.client import GenerateRequest
from gateway.prompts.parse import parse_prompt
from gateway.requests.hold import HeldOrder, hold_order
from gateway.requests.order import place_order
from gateway.wire.request import MessagesRequest
from tests.gateway.front import KEY, NOW_MS, Front, front
from tests.gateway.stack import RATES, Stack, running_stack
from tests.gateway.talk import Split, split_of, text, user

BODY = {"system": [text(1000, "s", ttl="1h")], "messages": [user(text(20, "u", ttl="5m"))]}


@pytest.fixture
def stack(tmp_path: Path):
    with running_stack(tmp_path) as stack:
        yield stack
        assert stack.open_holds() == []


def leases(stack: Stack, request_id: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = stack.record(request_id)["leases"]
    return found


def test_what_a_lease_cost_is_booked_when_it_is_read_and_when_it_ends(stack: Stack):
    first_id = stack.post(BODY).headers["request-id"]
    stack.at(100)
    assert split_of(stack.post(BODY)) == Split(read=1020)
    stack.wait_until(lambda: len(leases(stack, first_id)) == 2)
    read = leases(stack, first_id)

    stack.at(5_000)
    stack.wait_until(lambda: {lease["reason"] for lease in leases(stack, first_id)} == {"expired"})

    assert [lease["tokens"] for lease in read] == [1000, 1020]
    assert sum(lease["idle_block_ms"] for lease in read) == 64 * 100_000, "Each block once."
    (cost,) = stack.database.read_now(pin_costs)
    ended = leases(stack, first_id)
    assert cost.idle_block_ms == sum(lease["idle_block_ms"] for lease in ended)
    assert cost.num_leases == 2
    assert stack.database.read_now(verify).problems == ()


def test_grants_name_the_leases_that_were_written_and_then_read(stack: Stack):
    records = [stack.record(stack.post(BODY).headers["request-id"]) for _ in range(2)]

    wrote, read = ([g["lease_id"] for g in record["engine"]["grants"]] for record in records)
    assert wrote == read
    assert None not in wrote


def test_a_gateway_that_starts_later_books_what_it_missed(stack: Stack):
    first_id = stack.post(BODY).headers["request-id"]
    stack.stop_gateway()
    stack.at(5_000)
    stack.start_gateway(boot_id="gw_two")

    stack.wait_until(lambda: [e["reason"] for e in leases(stack, first_id)] == ["expired"] * 2)


@pytest.mark.anyio
async def test_leases_of_one_hour_entries_persist_and_others_do_not(tmp_path: Path):
    async with front(tmp_path) as gateway:
        card = PriceCard("wt:1", "wt", 1, effective_from_ms=0, rates=RATES)
        gateway.deps.database.write_now(lambda conn: publish(conn, [card], 0))

        request = await generate_request(gateway)

    asked = [(b.num_tokens, b.write, b.persist) for b in request.breakpoints]
    assert asked == [(1000, True, True), (1020, True, False)]


async def generate_request(gateway: Front) -> GenerateRequest:
    """What the engine would be asked for BODY."""
    wire = MessagesRequest.model_validate({"model": "wt", "max_tokens": 5, **BODY})
    prompt = await parse_prompt(wire, catalog=gateway.deps.catalog)
    engine_info = gateway.engine.info
    assert engine_info is not None

    def write(conn: Connection) -> HeldOrder | list[Any]:
        caller = find_caller(conn, KEY)
        assert caller is not None
        order = place_order(
            wire,
            prompt,
            caller=caller,
            engine_info=engine_info,
            request_id="req_1",
            message_id="msg_1",
            ignore_eos=False,
            started_at_ms=NOW_MS,
        )
        return hold_order(conn, order, deps=gateway.deps, may_wait=True)

    held = gateway.deps.database.write_now(write)
    assert isinstance(held, HeldOrder)
    return held.request
