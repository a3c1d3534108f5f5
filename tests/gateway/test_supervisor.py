"""Children live with their parent, are started again, and end in order."""

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from gateway.commands import supervisor
from gateway.commands.liveness import SILENT_PROBES
from gateway.commands.supervisor import STOP_SIGNALS, Child, run_children

pytestmark = pytest.mark.anyio

PID = "import os, sys; open(sys.argv[1] + '.pid', 'w').write(str(os.getpid())); "
OBEDIENT = PID + "sys.stdin.read(); open(sys.argv[2], 'a').write(sys.argv[3] + '\\n')"
STUBBORN = PID + "import time; time.sleep(60)"
DAMAGED = "import sys; sys.exit(3)"


class Family:
    """Two children whose last words go to one file, and what was said about them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said: list[str] = []
        self.stop = asyncio.Event()
        self.ready = asyncio.Event()

    def child(self, name: str, script: str, *, stop_seconds: float = 5, **more: Any) -> Child:
        return Child(
            name,
            [
                sys.executable,
                "-c",
                script,
                str(self.folder / name),
                str(self.folder / "words"),
                name,
            ],
            stop_seconds=stop_seconds,
            say=self.said.append,
            **more,
        )

    async def pid(self, name: str, *, other_than: int = 0) -> int:
        """The pid that the child wrote, once it is another one."""
        path = self.folder / f"{name}.pid"
        async with asyncio.timeout(5):
            while True:
                pid = int(path.read_text() or 0) if path.exists() else 0
                if pid not in (0, other_than):
                    return pid
                await asyncio.sleep(0.01)

    async def serve(self) -> None:
        self.ready.set()


async def test_children_end_in_reverse_order_of_their_start(tmp_path: Path) -> None:
    family = Family(tmp_path)
    children = [family.child("engine", OBEDIENT), family.child("gateway", OBEDIENT)]

    running = asyncio.create_task(run_children(children, ready=family.serve, stop=family.stop))
    await family.ready.wait()
    family.stop.set()

    assert await running is None
    assert (tmp_path / "words").read_text().split() == ["gateway", "engine"]


async def test_signals_of_the_group_never_reach_a_child(tmp_path: Path) -> None:
    family = Family(tmp_path)
    children = [family.child("engine", OBEDIENT)]

    running = asyncio.create_task(run_children(children, ready=family.serve, stop=family.stop))
    pid = await family.pid("engine")  # it has set no handler, as any child before its first line
    for number in STOP_SIGNALS:
        os.kill(pid, number)
    family.stop.set()

    assert await running is None
    assert family.said == []
    assert (tmp_path / "words").read_text().split() == ["engine"]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []).isdisjoint(STOP_SIGNALS)


async def test_a_child_that_dies_is_started_again_and_it_is_said(tmp_path: Path) -> None:
    family = Family(tmp_path)
    running = asyncio.create_task(
        run_children([family.child("engine", OBEDIENT)], ready=family.serve, stop=family.stop)
    )
    await family.ready.wait()

    pid = 0
    for _ in range(2):
        pid = await family.pid("engine", other_than=pid)
        os.kill(pid, signal.SIGKILL)
    await family.pid("engine", other_than=pid)
    family.stop.set()

    assert await running is None
    assert family.said == [
        "The engine ended with SIGKILL; starting it again in 0.2 s",
        "The engine ended with SIGKILL; starting it again in 0.4 s",
    ]


async def test_a_child_that_falls_silent_is_killed_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "PROBE_SECONDS", 0.01)
    family = Family(tmp_path)
    stopped, has_answered = 0, asyncio.Event()

    async def answers() -> bool:
        await asyncio.sleep(0)
        is_alive = await family.pid("engine") != stopped
        if is_alive:
            has_answered.set()
        return is_alive

    engine = family.child("engine", OBEDIENT, answers=answers)
    running = asyncio.create_task(run_children([engine], ready=family.serve, stop=family.stop))
    await family.ready.wait()
    pid = await family.pid("engine")
    await has_answered.wait()

    os.kill(pid, signal.SIGSTOP)
    stopped = pid
    await family.pid("engine", other_than=pid)
    family.stop.set()

    assert await running is None
    assert family.said == [
        "The engine has not answered for 0.12 s; killing it",
        "The engine ended with SIGKILL; starting it again in 0.2 s",
    ]


async def test_a_child_that_has_never_answered_is_still_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "PROBE_SECONDS", 0.001)
    family = Family(tmp_path)
    num_probes = 0

    async def answers() -> bool:
        nonlocal num_probes
        await asyncio.sleep(0)
        num_probes += 1
        if num_probes > 3 * SILENT_PROBES:
            family.stop.set()
        return False

    engine = family.child("engine", OBEDIENT, answers=answers)

    assert await run_children([engine], ready=family.serve, stop=family.stop) is None
    assert family.said == []


async def test_a_child_that_dies_before_it_serves_ends_the_start(tmp_path: Path) -> None:
    family = Family(tmp_path)
    children = [family.child("engine", DAMAGED), family.child("gateway", OBEDIENT)]

    problem = await run_children(children, ready=asyncio.Event().wait, stop=family.stop)

    assert problem == "The engine ended with exit code 3"
    assert (tmp_path / "words").read_text().split() == ["gateway"]


async def test_a_child_that_does_not_end_in_time_is_killed(tmp_path: Path) -> None:
    family = Family(tmp_path)
    stubborn = family.child("engine", STUBBORN, stop_seconds=0.05)

    running = asyncio.create_task(run_children([stubborn], ready=family.serve, stop=family.stop))
    await family.ready.wait()
    pid = await family.pid("engine")
    family.stop.set()

    assert await running is None
    assert "killing it" in family.said[0]
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        pytest.fail("the child is alive")
