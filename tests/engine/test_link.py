import asyncio
import gc
import socket
import time
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.client import (
    Admitted,
    Breakpoint,
    Committed,
    EngineLost,
    Finished,
    Rejected,
    Tokens,
    connect_engine,
)
from engine.link.address import AddressError, listen
from engine.link.client_socket import MAX_UNSENT_BYTES, ClientSocket
from engine.link.frames import (
    MAX_FRAME_BYTES,
    Abort,
    EngineMessage,
    Fault,
    Finish,
    FrameReader,
    Hello,
    Lookup,
    Stats,
    Submit,
    encode_client,
)
from engine.link.server import HELLO_MS, MAX_LINKS
from engine.protocol import EngineRecord, Grant
from tests.engine.harness import Clock, generate_request, running_engine, small_config
from tests.engine.scripted_runner import ScriptedRunner
from tests.engine.test_frames import values

HELLO = encode_client(Hello())


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def runner():
    return ScriptedRunner()


@pytest.fixture
def engine(runner, clock, tmp_path):
    with running_engine(runner, small_config(), clock, tmp_path) as engine:
        yield engine


@asynccontextmanager
async def connected(engine):
    client = connect_engine(engine.url)
    try:
        await client.ready(10)
        yield client
    finally:
        await client.close()


async def events_of(stream):
    return [event async for event in stream]


async def first_token(stream):
    async for event in stream:
        if isinstance(event, Tokens):
            return


async def closed_record(client, request_id):
    """The request's record once it has one; it must never be absent before."""
    async with asyncio.timeout(10):
        while (record := (await client.lookup([request_id]))[request_id]) is None:
            pass
    return record


async def test_a_request_runs_from_submit_to_its_last_event(engine):
    request = generate_request("req_1", breakpoints=(Breakpoint(16, ttl_ms=1_000, write=True),))

    async with connected(engine) as client:
        events = await events_of(client.generate(request))

        assert [type(e) for e in events] == [Admitted, Committed, Tokens, Tokens, Tokens, Finished]
        record = events[-1].record
        assert (record.output_tokens, record.finish_reason) == (3, "max_tokens")
        assert record.grants[0].committed
        assert await client.lookup(["req_1", "req_2"]) == {"req_1": record}


async def test_a_script_sees_the_whole_prompt_reused_blocks_included(engine, runner):
    runner.script = lambda prompt: [len(prompt) // 4, prompt[-4]]
    marks = (Breakpoint(37, ttl_ms=1_000, write=True),)

    async with connected(engine) as client:
        for request_id in ("req_1", "req_2"):
            request = generate_request(request_id, 40, max_tokens=2, breakpoints=marks)
            events = await events_of(client.generate(request))
            output = [
                id_ for event in events if isinstance(event, Tokens) for id_ in event.token_ids
            ]
            assert output == [40, 139]

        assert events[-1].record.tokens_reused_gift == 37


async def test_requests_of_two_links_run_together(engine):
    async with connected(engine) as one, connected(engine) as other:
        assert one.info == other.info == engine.info

        ends = await asyncio.gather(
            *(
                events_of(client.generate(generate_request(f"req_{name}{number}")))
                for name, client in (("a", one), ("b", other))
                for number in range(5)
            )
        )

    assert [events[-1].reason for events in ends] == ["max_tokens"] * 10


async def test_the_end_of_a_link_aborts_its_requests_and_closes_their_records(engine, runner):
    runner.pace_seconds = 0.01
    async with connected(engine) as watcher:
        async with connected(engine) as client:
            stream = client.generate(generate_request("req_1", max_tokens=400))
            await first_token(stream)
            assert (await watcher.lookup(["req_1"])) == {"req_1": None}

        with pytest.raises(EngineLost):
            await events_of(stream)

        record = await closed_record(watcher, "req_1")
        assert record.finish_reason == "aborted"
        assert 0 < record.output_tokens < 400
        assert (await watcher.stats())["num_requests_running"] == 0


async def test_a_lookup_beside_the_end_of_a_link_finds_its_request_closed(engine, runner):
    runner.gate.clear()
    async with connected(engine) as watcher:
        with raw_link(engine) as link:
            link.sendall(encode_client(Submit(generate_request("req_1"))))
            await asyncio.to_thread(runner.at_gate.wait, 10)
        asking = asyncio.ensure_future(watcher.lookup(["req_1"]))
        await asyncio.sleep(0)  # the question is sent; both now wait for the engine

        runner.gate.set()

        assert (await asking)["req_1"].finish_reason == "aborted"


async def test_a_thrown_away_generation_is_aborted(engine, runner):
    runner.pace_seconds = 0.01
    async with connected(engine) as client:
        async for event in client.generate(generate_request("req_1", max_tokens=400)):
            if isinstance(event, Tokens):
                break
        gc.collect()

        assert (await closed_record(client, "req_1")).finish_reason == "aborted"


async def test_a_cancelled_wait_loses_no_event(engine, runner):
    runner.gate.clear()
    async with connected(engine) as client:
        stream = client.generate(generate_request("req_1"))
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        waiting.cancel()

        runner.gate.set()

        assert len(await events_of(stream)) == 5


async def test_finish_keeps_the_output_up_to_the_stop_string(engine, runner):
    runner.pace_seconds = 0.01
    async with connected(engine) as client:
        stream = client.generate(generate_request("req_1", max_tokens=400))
        await first_token(stream)
        stream.finish(1)

        record = (await events_of(stream))[-1].record

    assert (record.finish_reason, record.output_tokens) == ("finished", 1)


async def test_a_failing_step_fails_its_requests_and_not_the_engine(engine, runner):
    runner.fail_after = 2
    async with connected(engine) as client:
        events = await events_of(client.generate(generate_request("req_1")))
        assert (events[-1].reason, events[-1].record.output_tokens) == ("error", 2)

        runner.fail_after = None
        events = await events_of(client.generate(generate_request("req_2")))
        assert events[-1].reason == "max_tokens"


async def test_a_request_id_is_used_once(engine, runner):
    runner.gate.clear()
    async with connected(engine) as one, connected(engine) as other:
        first = one.generate(generate_request("req_1"))
        runner.gate.set()
        await first_token(first)

        (rejected,) = await events_of(other.generate(generate_request("req_1")))
        assert isinstance(rejected, Rejected)
        assert rejected.code == "invalid_request"

        assert (await events_of(first))[-1].reason == "max_tokens"
        (rejected,) = await events_of(one.generate(generate_request("req_1")))
        assert isinstance(rejected, Rejected)


async def test_a_link_cannot_end_the_requests_of_another(engine, runner):
    runner.pace_seconds = 0.01
    async with connected(engine) as client:
        stream = client.generate(generate_request("req_1", max_tokens=20))
        with raw_link(engine) as link:
            link.sendall(encode_client(Abort("req_1")) + encode_client(Finish("req_1", 0)))
            link.sendall(encode_client(Stats(1)))
            link.recv(1)

            assert (await events_of(stream))[-1].reason == "max_tokens"


async def test_a_lease_expires_in_an_idle_engine(engine, clock):
    request = generate_request("req_1", breakpoints=(Breakpoint(16, ttl_ms=1_000, write=True),))
    async with connected(engine) as client:
        await events_of(client.generate(request))
        assert (await client.stats())["leases_live"] == 1

        clock.advance(1_000 + small_config().lease_grace_ms + 1)

        await asyncio.to_thread(has_no_lease, engine)


def has_no_lease(engine):
    """Wait for it without a message, which would wake the engine."""
    while engine.core.stats()["leases_live"]:
        time.sleep(0.001)


async def test_an_engine_that_stops_closes_what_runs(runner, clock, tmp_path):
    runner.pace_seconds = 0.01
    with running_engine(runner, small_config(), clock, tmp_path) as engine:
        client = connect_engine(engine.url)
        await client.ready(10)
        stream = client.generate(generate_request("req_1", max_tokens=400))
        await first_token(stream)
    events = await events_of(stream)
    assert events[-1].reason == "aborted"

    with running_engine(runner, small_config(), clock, tmp_path) as engine:
        with pytest.raises(EngineLost):  # the first engine's link
            await client.lookup(["req_1"])
        assert await client.ready(10) == engine.info
        assert await client.lookup(["req_1"]) == {"req_1": events[-1].record}
        await client.close()


async def test_a_client_without_an_engine_says_so(tmp_path):
    client = connect_engine(f"unix:{tmp_path / 'nobody.sock'}")

    with pytest.raises(EngineLost, match="No engine at"):
        await client.ready(0.01)
    with pytest.raises(EngineLost):
        client.generate(generate_request("req_1"))
    with pytest.raises(EngineLost):
        await client.lookup(["req_1"])

    assert client.info is None
    await client.close()


@pytest.mark.parametrize("place", ["tcp", "deep"])
async def test_an_engine_is_reached_over_tcp_and_in_a_deep_folder(place, runner, clock, tmp_path):
    url = "tcp://127.0.0.1:0" if place == "tcp" else f"unix:{tmp_path}/{'d' * 90}/{'e' * 90}/s"

    with running_engine(runner, small_config(), clock, tmp_path, url=url) as engine:
        async with connected(engine) as client:
            events = await events_of(client.generate(generate_request("req_1")))
            assert events[-1].reason == "max_tokens"


def test_an_address_in_use_is_refused_and_a_stale_one_replaced(tmp_path):
    url = f"unix:{tmp_path / 'run' / 'engine.sock'}"
    listener = listen(url)
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "run" / "engine.sock").stat().st_mode & 0o777 == 0o600

    with pytest.raises(AddressError, match="another engine serves it"):
        listen(url)

    listener.close()
    listen(url).close()


def test_a_port_in_use_is_one_sentence():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"tcp://127.0.0.1:{taken.getsockname()[1]}"

        with pytest.raises(AddressError, match=f"{url}: Address already in use.$"):
            listen(url)


@pytest.mark.parametrize(
    "url", ["", "unix:", "tcp://host", "tcp://:1", "tcp://h:99999", "http://h:1"]
)
def test_what_is_no_address_is_refused(url):
    with pytest.raises(AddressError, match="Not an engine address"):
        listen(url)


def raw_link(engine, hello=HELLO):
    """A connected socket that has said hello."""
    link = socket.socket(socket.AF_UNIX)
    link.settimeout(10)
    link.connect(engine.url.removeprefix("unix:"))
    link.sendall(hello)
    return link


def messages_until_the_end(link):
    reader, messages = FrameReader(EngineMessage), []
    while data := link.recv(1 << 16):
        messages += reader.feed(data)
    return messages


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\xff" * 8, "Frame too long"),
        (b"\0\0\0\1\xc1", "Not a msgpack map"),
        (b"\0\0\0\1\x90", "Expected one of"),
        (encode_client(Hello()), "one hello"),
        (encode_client(Finish("req_1", -1)), "negative"),
        (encode_client(Lookup(1, ("req",) * 5_000)), "at most 128"),
        (encode_client(Submit(generate_request("x" * 257))), "at most 256"),
    ],
)
def test_what_is_no_message_ends_its_link_with_a_reason(engine, data, reason):
    with raw_link(engine) as link:
        link.sendall(data)
        messages = messages_until_the_end(link)

    assert isinstance(messages[-1], Fault)
    assert reason in messages[-1].message


@pytest.mark.parametrize("first", [encode_client(Stats(1)), encode_client(Hello(version=99))])
def test_a_link_opens_with_a_hello_of_this_version(engine, first):
    with raw_link(engine, hello=first) as link:
        (fault,) = messages_until_the_end(link)

    assert isinstance(fault, Fault)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=100))
def test_no_bytes_end_the_engine(engine, data):
    with raw_link(engine) as link:
        link.sendall(data)
        link.shutdown(socket.SHUT_WR)
        messages_until_the_end(link)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(message=st.one_of(values(kind) for kind in (Submit, Abort, Lookup, Stats)))
def test_no_message_ends_the_engine(engine, message):
    with raw_link(engine) as link:
        link.sendall(encode_client(message))
        link.shutdown(socket.SHUT_WR)
        messages_until_the_end(link)


def test_a_request_id_longer_than_half_a_frame_does_not_end_the_engine(engine):
    with raw_link(engine) as link, suppress(OSError):  # the second use is answered with it twice
        link.sendall(encode_client(Submit(generate_request("x" * (33 << 20)))) * 2)
    with raw_link(engine) as link:
        link.shutdown(socket.SHUT_WR)
        assert messages_until_the_end(link) == [Hello(info=engine.info)]


def test_a_link_that_asks_and_does_not_read_is_dropped_early(engine):
    asked = 0
    stats = engine.core.stats

    def counted():
        nonlocal asked
        asked += 1
        return stats()

    engine.core.stats = counted
    with raw_link(engine) as greedy, suppress(OSError):
        for _ in range(40):
            greedy.sendall(encode_client(Stats(1)) * 10_000)
    with raw_link(engine) as link:  # is served after all that the other one asked
        link.sendall(encode_client(Stats(2)))
        link.shutdown(socket.SHUT_WR)
        messages_until_the_end(link)

    assert asked < 100_000


def test_a_link_that_says_nothing_leaves_its_place_to_others(engine, clock):
    silent = [raw_link(engine, hello=b"") for _ in range(MAX_LINKS)]
    with raw_link(engine) as refused, suppress(ConnectionResetError):  # its hello is not read
        messages_until_the_end(refused)

    clock.advance(HELLO_MS)

    for link in silent:
        (fault,) = messages_until_the_end(link)
        assert fault == Fault("No hello in 10 seconds.")
        link.close()
    with raw_link(engine) as link:
        link.shutdown(socket.SHUT_WR)
        assert messages_until_the_end(link) == [Hello(info=engine.info)]


async def test_a_lease_for_longer_than_a_week_is_refused(engine):
    async with connected(engine) as client:
        month_ms = 30 * 24 * 3_600_000
        asked = generate_request("req_1", breakpoints=(Breakpoint(20, month_ms, write=True),))
        (rejected,) = await events_of(client.generate(asked))

        assert rejected.code == "invalid_request"
        assert await client.lookup(["req_1"]) == {}


async def test_a_clock_that_jumps_far_back_does_not_end_an_idle_engine(engine, clock):
    async with connected(engine) as client:
        asked = generate_request("req_1", breakpoints=(Breakpoint(20, 604_800_000, write=True),))
        await events_of(client.generate(asked))
        clock.advance(-40 * 24 * 3_600_000)

        assert (await client.stats())["leases_live"] == 1


def test_a_message_longer_than_a_frame_ends_its_link_and_nothing_else():
    ours, theirs = socket.socketpair()
    link = ClientSocket(ours)

    link.send(Fault("x" * MAX_FRAME_BYTES))

    assert link.ended
    (fault,) = FrameReader(EngineMessage).feed(theirs.recv(1 << 16))
    assert "Frame too long" in fault.message
    link.close()
    theirs.close()


async def test_a_lookup_of_any_length_finds_every_record(engine):
    grants = tuple(Grant(n, True, "granted", None, True, "x" * 40) for n in range(1, 257))
    ids = [f"req_{number}" for number in range(800)]
    record = EngineRecord("", "eng", 256, 0, 0, 0, 0, 256, grants, 0, 0, "max_tokens")
    for request_id in ids:
        engine.journal.finished(replace(record, request_id=request_id))

    async with connected(engine) as client:
        assert list(await client.lookup(ids)) == ids


async def test_a_damaged_record_is_left_out_and_counted(engine, tmp_path):
    async with connected(engine) as client:
        for number in range(2):
            await events_of(client.generate(generate_request(f"req_{number}")))
        (log,) = (tmp_path / "journal").glob("closed-*.log")
        data = bytearray(log.read_bytes())
        data[30] ^= 1
        log.write_bytes(bytes(data))

        assert list(await client.lookup(["req_0", "req_1"])) == ["req_1"]
        assert (await client.stats())["journal_lines_unreadable_total"] == 1


async def test_a_cut_frame_ends_with_its_link(engine):
    with raw_link(engine) as link:
        link.sendall(encode_client(Submit(generate_request("req_1")))[:-1])

    async with connected(engine) as client:
        assert await client.lookup(["req_1"]) == {}


def test_a_client_that_does_not_read_is_dropped():
    ours, theirs = socket.socketpair()
    link = ClientSocket(ours)
    megabyte = Fault("x" * (1 << 20))

    num_sent = 0
    while not link.ended:
        link.send(megabyte)
        num_sent += 1

    assert MAX_UNSENT_BYTES < num_sent << 20 < 2 * MAX_UNSENT_BYTES
    link.close()
    theirs.close()


def test_a_slow_reader_gets_every_answer(engine):
    num_calls = 3_000  # about 2 MB of answers, more than the connection buffers
    answers = []

    with raw_link(engine) as link:
        link.sendall(b"".join(encode_client(Stats(call)) for call in range(num_calls)))
        reader = FrameReader(EngineMessage)
        while len(answers) < num_calls + 1:
            answers += reader.feed(link.recv(1 << 12))

    assert [answer.call for answer in answers[1:]] == list(range(num_calls))
