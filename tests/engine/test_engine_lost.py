import subprocess
import sys
from contextlib import contextmanager

import pytest

from engine.client import Breakpoint, Committed, EngineLost, Tokens, connect_engine
from tests.engine.harness import Clock, generate_request, running_engine, small_config
from tests.engine.scripted_runner import ScriptedRunner


@pytest.fixture
def anyio_backend():
    return "asyncio"


@contextmanager
def doomed_engine(folder, stall_at):
    """An engine in a process of its own, killed with SIGKILL at the end of the block."""
    command = [sys.executable, "-m", "tests.engine.doomed_engine", str(folder), str(stall_at)]
    process = subprocess.Popen(command)
    try:
        yield
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("num_seen", [0, 5])
async def test_the_journal_knows_what_a_killed_engine_had_told(num_seen, tmp_path):
    marks = (Breakpoint(16, ttl_ms=1_000, write=True), Breakpoint(20, ttl_ms=1_000, write=True))
    request = generate_request("req_1", prompt_tokens=24, max_tokens=100, breakpoints=marks)
    seen = []
    client = connect_engine(f"unix:{tmp_path / 'engine.sock'}")
    with doomed_engine(tmp_path, stall_at=num_seen):
        first_info = await client.ready(30)
        stream = client.generate(request)
        async for event in stream:
            seen.append(type(event))
            if seen.count(Committed) == 2 and seen.count(Tokens) == num_seen:
                break

    with pytest.raises(EngineLost):
        await anext(stream)

    with running_engine(ScriptedRunner(), small_config(), Clock(), tmp_path) as engine:
        assert await client.ready(30) == engine.info != first_info
        lost = (await client.lookup(["req_1", "req_2"])).pop("req_1")
        await client.close()
    assert (lost.finish_reason, lost.output_tokens) == ("engine_lost", num_seen)
    assert lost.engine_boot_id == first_info.engine_boot_id
    assert [(grant.num_tokens, grant.committed) for grant in lost.grants] == [
        (16, True),
        (20, True),
    ]
    assert lost.tokens_computed == lost.prompt_tokens == 24
