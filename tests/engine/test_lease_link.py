"""Leases over the link: unpinning them, and hearing what they cost."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from engine.client import Breakpoint, Committed, Finished, LeaseReport, connect_engine
from tests.engine.harness import Clock, generate_request, running_engine, small_config
from tests.engine.scripted_runner import ScriptedRunner


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def engine(clock, tmp_path):
    with running_engine(ScriptedRunner(), small_config(), clock, tmp_path) as engine:
        yield engine


@asynccontextmanager
async def connected(engine):
    client = connect_engine(engine.url)
    try:
        await client.ready(10)
        yield client
    finally:
        await client.close()


async def write_lease(client, request_id="req_1", namespace=b"tenant"):
    """Make a lease of 16 tokens; return its id."""
    marks = (Breakpoint(16, ttl_ms=10_000, write=True, persist=True),)
    request = generate_request(request_id, namespace=namespace, breakpoints=marks)
    events = [event async for event in client.generate(request)]
    assert any(isinstance(event, Committed) for event in events)
    assert isinstance(events[-1], Finished)
    (grant,) = events[-1].record.grants
    return grant.lease_id


async def next_report(client) -> LeaseReport:
    async with asyncio.timeout(10):
        return await anext(client.lease_reports())


async def test_leases_end_by_id_and_by_namespace_and_ending_twice_changes_nothing(engine):
    async with connected(engine) as client:
        ids = [await write_lease(client, f"req_{n}", f"tenant {n}".encode()) for n in range(3)]

        by_id = await client.unpin(lease_ids=[ids[0], "unknown"])
        again = await client.unpin(lease_ids=[ids[0]])
        by_namespaces = await client.unpin(namespaces=[b"tenant 1", b"tenant 2", b"nobody"])

        assert (by_id, again, by_namespaces) == (1, 0, 2)
        gauges = await client.stats()
        assert gauges["leases_live"] == gauges["kv_blocks_pinned"] == 0
        assert gauges["lease_unpinned_total"] == 3


async def test_an_idle_engine_reports_a_lease_when_it_expires(engine, clock):
    async with connected(engine) as client:
        lease_id = await write_lease(client)

        clock.advance(15_000)  # grace included

        assert await next_report(client) == LeaseReport(
            lease_id=lease_id,
            request_id="req_1",
            num_tokens=16,
            reason="expired",
            tier="device",
            num_bytes=1,
            idle_block_ms=15_000,
            contended_block_ms=0,
        )


async def test_every_link_hears_every_report(engine):
    async with connected(engine) as first, connected(engine) as second:
        await write_lease(first)
        await first.unpin(namespaces=[b"tenant"])

        assert await next_report(first) == await next_report(second)


async def test_what_was_reported_while_nobody_listened_is_told_to_the_next(engine, clock):
    async with connected(engine) as client:
        lease_id = await write_lease(client)
    clock.advance(20_000)

    async with connected(engine) as client:
        await client.stats()
        report = await next_report(client)

    assert (report.lease_id, report.reason) == (lease_id, "expired")


async def test_a_new_link_hears_again_what_one_that_died_may_not_have_kept(engine, clock):
    async with connected(engine) as client:
        await write_lease(client)
        clock.advance(15_000)
        told = await next_report(client)  # and its gateway is killed before it commits

    async with connected(engine) as client:
        await client.stats()
        again = await next_report(client)

    assert again == told


async def test_of_one_lease_a_new_link_hears_only_the_newest_report(engine, clock):
    async with connected(engine) as client:
        await write_lease(client)
        clock.advance(1_000)
        await write_lease(client, "req_2")  # the same prefix: refreshed
        clock.advance(20_000)
        await next_report(client)
        await next_report(client)

    async with connected(engine) as client:
        assert (await next_report(client)).reason == "expired"


async def test_what_leases_cost_by_the_stop_is_told_by_the_next_engine(clock, tmp_path):
    with running_engine(ScriptedRunner(), small_config(), clock, tmp_path) as engine:
        async with connected(engine) as client:
            lease_id = await write_lease(client)
        clock.advance(1_000)

    with running_engine(ScriptedRunner(), small_config(), clock, tmp_path) as engine:
        async with connected(engine) as client:
            report = await next_report(client)

    assert (report.lease_id, report.reason, report.idle_block_ms) == (lease_id, "stopped", 1_000)


async def test_reports_end_with_the_client(engine):
    async with connected(engine) as client:
        reports = client.lease_reports()
        waiting = asyncio.ensure_future(anext(reports, None))
        await asyncio.sleep(0)

        await client.close()

        assert await waiting is None


async def test_an_engine_that_stops_reports_what_leases_have_cost(clock, tmp_path):
    with running_engine(ScriptedRunner(), small_config(), clock, tmp_path) as engine:
        client = connect_engine(engine.url)
        await client.ready(10)
        await write_lease(client)
        clock.advance(1_000)
    report = await next_report(client)
    await client.close()

    assert (report.reason, report.idle_block_ms) == ("stopped", 1_000)
