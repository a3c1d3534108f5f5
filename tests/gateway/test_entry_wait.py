"""Waiting for what another request writes: one of many pays, and nobody waits for long."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from billing import reports
from billing.entries import PendingEntry, activate
from billing.holds import find_hold, open_hold
from billing.meters import Meter
from billing.owners import Owner, register
from billing.settlement import release
from billing.verification import verify
from engine.plan import Plan
from gateway.errors import TooManyWaiting
from gateway.requests.entry_wait import EntryWait
from gateway.requests.hold import AWAITED_MS_MAX
from gateway.wake_ups import MAX_WAITING, WakeUps
from tests.gateway.books import assert_books_agree
from tests.gateway.stack import PATIENCE_SECONDS, MortalRunner, Stack, running_stack, word_config
from tests.gateway.talk import Split, read_events, split_of, text, user
from tests.gateway.words import Words
from tests.postgres import postgres_server

BODY = {"messages": [user(text(1000, "u", ttl="5m"))]}
OTHER = {"messages": [user(text(10, "o"))]}


class FailsOnce(MortalRunner):
    """Fails in the first step that would hand out a token, after its gate."""

    has_failed = False

    def execute(self, plan: Plan) -> list[int]:
        tokens = super().execute(plan)
        if tokens and not self.has_failed:
            self.has_failed = True
            raise RuntimeError("the script says: fail once")
        return tokens


@pytest.fixture
def stack(tmp_path: Path):
    with running_stack(tmp_path) as stack:
        yield stack
        assert stack.open_holds() == []


@pytest.fixture
def new_postgres():
    with postgres_server() as new_database:
        yield new_database


def num_waiting(stack: Stack) -> float:
    return stack.metric("kvmeter_cache_waiting")


def num_waits(stack: Stack, outcome: str) -> float:
    return stack.metric("kvmeter_cache_waits_total", outcome=outcome)


def ask_together(stack: Stack, num_requests: int, body: dict[str, Any] = BODY) -> list[Split]:
    """The leader stands at its first token until all others wait for it."""
    stack.runner.gate.clear()
    with ThreadPoolExecutor(num_requests) as pool:
        answers = [pool.submit(stack.post, body) for _ in range(num_requests)]
        stack.wait_until(lambda: num_waiting(stack) == num_requests - 1)
        assert len(stack.open_holds()) == 1, "Who waits holds nothing."
        stack.runner.gate.set()
        responses = [answer.result() for answer in answers]
    for response in responses:
        if response.status_code == 200:
            assert_books_agree(stack, response.headers["request-id"], response.json()["usage"])
    return [split_of(response) for response in responses if response.status_code == 200]


@pytest.mark.parametrize("dialect", ["sqlite", "postgresql"])
def test_of_eight_identical_cold_requests_one_writes_and_seven_read(
    tmp_path: Path, request: pytest.FixtureRequest, dialect: str
):
    url = request.getfixturevalue("new_postgres")() if dialect == "postgresql" else None
    with running_stack(tmp_path, database_url=url) as stack:
        splits = ask_together(stack, 8)

        assert sorted(splits) == [Split(w5=1000), *[Split(read=1000)] * 7]
        (row,) = stack.database.read_now(reports.usage)
        assert row.quantities[Meter.CACHE_WRITE_5M] == 1000
        assert row.quantities[Meter.CACHE_READ] == 7000
        assert num_waits(stack, "read") == 7
        assert stack.database.read_now(verify).problems == ()


def test_when_the_writer_fails_one_of_the_others_writes(tmp_path: Path):
    runner = FailsOnce(Words().ids("one two three four five"))
    with running_stack(tmp_path, runner=runner) as stack:
        splits = ask_together(stack, 4)

        assert sorted(splits) == [Split(w5=1000), *[Split(read=1000)] * 2]
        assert stack.database.read_now(verify).problems == ()
        assert num_waits(stack, "vanished") == 1
        assert num_waits(stack, "read") == 2


def test_after_the_bound_a_request_pays_its_own_write(tmp_path: Path):
    with running_stack(tmp_path, settings={"cache_wait_seconds": 0.05}) as stack:
        stack.runner.gate.clear()
        with stack.in_background(BODY) as first, stack.in_background(BODY) as second:
            stack.wait_until(lambda: len(stack.open_holds()) == 2)
            stack.runner.gate.set()

        assert split_of(first.result()) == split_of(second.result()) == Split(w5=1000)
        assert num_waits(stack, "timed_out") == 1
        assert split_of(stack.post(BODY)) == Split(read=1000)


def test_a_client_that_leaves_ends_its_wait_and_leaves_nothing(stack: Stack):
    stack.runner.gate.clear()
    with stack.in_background(BODY) as leader:
        assert stack.runner.at_gate.wait(PATIENCE_SECONDS)
        stack.leave_early(BODY, seconds=1)
        stack.wait_until(lambda: num_waits(stack, "stopped") == 1)
        assert num_waiting(stack) == 0
        assert len(stack.open_holds()) == 1
        stack.runner.gate.set()

    assert split_of(leader.result()) == Split(w5=1000)
    (row,) = stack.database.read_now(reports.usage)
    assert row.num_requests == 1


def test_a_drain_ends_every_wait(stack: Stack):
    stack.runner.gate.clear()
    with stack.in_background(BODY), stack.in_background(BODY):
        stack.wait_until(lambda: num_waiting(stack) == 1)
        with ThreadPoolExecutor(1) as pool:
            draining = pool.submit(stack.drain, 0)
            stack.wait_until(lambda: num_waits(stack, "stopped") == 1)
            stack.runner.gate.set()
            draining.result()


def test_a_request_waits_for_the_longest_prefix_that_someone_writes(stack: Stack):
    system = [text(600, "s", ttl="5m")]
    assert split_of(stack.post({"system": system, "messages": [user(text(1))]})).w5 == 600
    longer = {"system": system, "messages": [user(text(400, "u", ttl="5m"))]}

    splits = ask_together(stack, 3, longer)

    assert sorted(splits) == [Split(read=600, w5=400), *[Split(read=1000)] * 2]


def test_a_request_does_not_wait_for_less_than_it_reads(stack: Stack):
    long = {"messages": [user(text(600, "a"), text(400, "b", ttl="5m"))]}
    short = {"messages": [user(text(600, "a", ttl="5m"), text(500, "c"))]}
    assert split_of(stack.post(long)) == Split(w5=1000)
    stack.runner.gate.clear()
    with stack.in_background(short) as writing:
        assert stack.runner.at_gate.wait(PATIENCE_SECONDS)
        with stack.in_background(long) as reading:
            stack.wait_until(lambda: len(stack.open_holds()) == 2)
            assert num_waiting(stack) == 0
            stack.runner.gate.set()

    assert split_of(reading.result()) == Split(read=1000)
    assert split_of(writing.result()) == Split(w5=600, input=500)


def test_nobody_waits_for_a_write_that_the_engine_refused(tmp_path: Path):
    config = word_config(num_blocks=2_048, pin_cap_blocks=40, namespace_quota_blocks=40)
    with running_stack(tmp_path, config=config) as stack:
        stack.runner.pace_seconds = 0.01
        with stack.stream(BODY | {"max_tokens": 5_000}) as first:
            events = read_events(first)
            assert next(events)["type"] == "message_start"
            assert "refused=" in first.headers["x-kvmeter-cache"]

            second = stack.post(BODY)

            assert split_of(second) == Split(input=1000)
            assert len(stack.open_holds()) == 1, "The first one still runs."
        stack.wait_until(lambda: stack.open_holds() == [])


def left_by_another_process(stack: Stack) -> str:
    """A pending entry of BODY's prefix whose gateway is not this one; answers its request's id."""
    response = stack.post(BODY)
    stack.at(1_000)  # what it wrote has expired
    first_id = response.headers["request-id"]
    hold = stack.database.read_now(lambda conn: find_hold(conn, first_id))
    assert hold is not None
    other = Owner(
        boot_id="gw_other",
        instance_id="elsewhere",
        engine_id=hold.engine_id or "",
        started_at_ms=stack.now_ms(),
        beats=0,
    )
    stack.database.write_now(lambda conn: register(conn, other))
    foreign = replace(
        hold, request_id="req_foreign", owner_boot_id="gw_other", started_at_ms=stack.now_ms()
    )
    stack.database.write_now(
        lambda conn: open_hold(
            conn,
            foreign,
            ttl_ms={"5m": 300_000, "1h": 3_600_000},
            awaited_until_ms=stack.now_ms() + AWAITED_MS_MAX,
        )
    )
    return foreign.request_id


def release_foreign(stack: Stack) -> None:
    ended_at_ms = stack.now_ms()
    stack.database.write_now(
        lambda conn: release(
            conn,
            request_id="req_foreign",
            owner_boot_id="gw_other",
            reason="x",
            ended_at_ms=ended_at_ms,
        )
    )


def test_what_another_process_writes_is_read_soon_after_its_commit(stack: Stack):
    request_id = left_by_another_process(stack)
    with stack.in_background(BODY) as later:
        stack.wait_until(lambda: num_waiting(stack) == 1)
        stack.database.write_now(
            lambda conn: activate(conn, request_id=request_id, num_tokens=1000)
        )

    assert split_of(later.result()) == Split(read=1000)
    release_foreign(stack)


def test_what_a_dead_process_was_writing_blocks_nobody_after_its_deadline(stack: Stack):
    left_by_another_process(stack)
    with stack.in_background(BODY) as later:
        stack.wait_until(lambda: num_waiting(stack) == 1)
        stack.at(1_000 + AWAITED_MS_MAX / 1000)

    assert split_of(later.result()) == Split(w5=1000)
    assert split_of(stack.post(BODY)) == Split(read=1000)
    release_foreign(stack)


def test_a_gateway_that_starts_again_takes_back_what_its_predecessor_was_writing(tmp_path: Path):
    with running_stack(tmp_path, config=word_config(max_num_seqs=1)) as stack:
        stack.runner.pace_seconds = 0.02
        with ThreadPoolExecutor(1) as pool, stack.stream({**OTHER, "max_tokens": 5_000}):
            lost = pool.submit(stack.post, BODY)
            stack.wait_until(lambda: len(stack.open_holds()) == 2)
            stack.kill_gateway()
            assert lost.exception() is not None or lost.result().status_code != 200
        stack.start_gateway(boot_id="gw_two")

        assert split_of(stack.post(BODY)) == Split(w5=1000)
        assert num_waits(stack, "timed_out") == 0
        stack.wait_until(lambda: stack.open_holds() == [])


def test_too_many_waiting_requests_are_refused():
    async def wait() -> None:
        wake_ups = WakeUps()
        with ExitStack() as seats:
            for _ in range(MAX_WAITING):
                seats.enter_context(wake_ups.subscribe(["req_leader"], asyncio.Event()))
            wait = EntryWait(wake_ups, boot_id="gw_one", seconds=30)
            with pytest.raises(TooManyWaiting):
                await wait.until_changed([PendingEntry("key", 1000, "req_leader", "gw_one")])

    asyncio.run(wait())
