"""kill -9 of the gateway, and of the engine, in the middle of 20 streams.

After the restart no hold is open, each request is charged once or not at all as the engine's
journal proves, and live cache entries still read.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from billing.database import Database
from billing.holds import open_holds
from engine.client import EngineRecord, connect_engine
from gateway.settings import Settings
from tests.gateway.words import words
from tests.system.installation import Installation, wait_until
from tests.system.streams import Stream

NUM_STREAMS = 20
ROUNDS, SOAK_ROUNDS = 2, 10


def body(number: int, *, prefix: str, max_tokens: int) -> dict[str, Any]:
    block = {"type": "text", "text": prefix, "cache_control": {"type": "ephemeral"}}
    return {
        "model": "tiny",
        "max_tokens": max_tokens,
        "system": [block],
        "messages": [{"role": "user", "content": f"question {number}"}],
    }


@pytest.mark.parametrize("victim", ["gateway", "engine"])
def test_a_killed_process_costs_nobody_a_wrong_cent(
    installation: Installation, victim: str, soak: bool
) -> None:
    with installation:
        database = Database(Settings(data_dir=installation.data_dir).ledger_url, now_ms=lambda: 0)
        for number in range(SOAK_ROUNDS if soak else ROUNDS):
            prefix = f"round {number} {words(60)}"
            written = read_once(installation, prefix)
            assert written["usage"]["cache_creation_input_tokens"] > 0

            streams = kill_amid_streams(installation, victim, prefix)

            wait_until(lambda: not database.read_now(open_holds), 30)
            check_charges(installation, streams)
            check_still_read(installation, victim, prefix, written)
        database.close()
        assert "no problems" in installation.run("ledger", "verify")


def kill_amid_streams(installation: Installation, victim: str, prefix: str) -> list[Stream]:
    """Kill `victim` once every stream has begun; return them when `up` has healed itself."""
    streams = [
        Stream(installation, body(number, prefix=prefix, max_tokens=1_500))
        for number in range(NUM_STREAMS)
    ]
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        for stream in streams:
            threads.submit(stream.run)
        for stream in streams:
            assert stream.begun.wait(30)
        killed = installation.kill(victim)
    installation.wait_restarted(victim, killed)
    return streams


def check_charges(installation: Installation, streams: Sequence[Stream]) -> None:
    """What was cut is free, its record says what the journal says, no client saw more than that."""
    ids = [stream.request_id for stream in streams if stream.request_id is not None]
    assert len(ids) == NUM_STREAMS
    journal = asyncio.run(look_up(installation, ids))
    for stream in streams:
        assert stream.request_id is not None
        record = installation.record(stream.request_id)
        known = journal[stream.request_id]
        assert known is not None
        charged = {posting["meter"] for posting in record["postings"]}
        assert len(charged) == len(record["postings"]), "a meter was charged twice"
        is_whole = record["status"] == "completed"
        assert record["usage"]["output_tokens"] == (known.output_tokens if is_whole else 0)
        assert bool(record["postings"]) == is_whole
        assert stream.num_texts <= known.output_tokens
        assert record["engine"]["output_tokens"] == known.output_tokens
        assert is_whole or not stream.ended


async def look_up(installation: Installation, ids: list[str]) -> dict[str, EngineRecord | None]:
    link = connect_engine(Settings(data_dir=installation.data_dir).link_url)
    try:
        await link.ready(10)
        return await link.lookup(ids)
    finally:
        await link.close()


def check_still_read(
    installation: Installation, victim: str, prefix: str, written: dict[str, Any]
) -> None:
    """The entry that was live before the kill is read after it, recomputed at our cost or not."""
    record = read_once(installation, prefix)
    read = written["usage"]["cache_creation_input_tokens"]
    lost = "tokens_read_recomputed" if victim == "engine" else "tokens_reused_promised"

    assert record["usage"]["cache_read_input_tokens"] == read
    assert record["engine"][lost] == read


def read_once(installation: Installation, prefix: str) -> dict[str, Any]:
    """The record of one short request with this prefix."""
    with installation.client() as client:
        answer = client.post("/v1/messages", json=body(-1, prefix=prefix, max_tokens=2))
    assert answer.status_code == 200, answer.text
    return installation.record(answer.headers["request-id"])
