"""A supervisor: starts the child processes of `kvmeter up`, restarts them, stops them.

A child that dies is started again, and so is one that has stopped answering: it is killed first.

A child's stdin is a pipe whose other end only this process holds; closing it is the order to stop.
Children start with the signals of the process group blocked, so that a Ctrl-C stops them in our
order. When this process is killed, the kernel closes the pipes, and no child is left.
"""

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable, Sequence

from gateway.commands.liveness import PROBE_SECONDS, SILENT_PROBES

FIRST_BACKOFF_SECONDS = 0.2
LAST_BACKOFF_SECONDS = 10.0
STABLE_SECONDS = 30.0  # a child that lived this long starts with a short back-off again

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # SIGHUP: the terminal has gone

STDIN_FLAG = "--until-stdin-closes"


class Child:
    """One process: started, started again when it dies, stopped by the end of its stdin.

    `answers` asks the process for a sign of life, for `PROBE_SECONDS` at most.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        stop_seconds: float,
        say: Callable[[str], None],
        answers: Callable[[], Awaitable[bool]] | None = None,
    ) -> None:
        self.name = name
        self._command = [*command, STDIN_FLAG]
        self._stop_seconds = stop_seconds
        self._say = say
        self._answers = answers
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the process."""
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # the child inherits it
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdin=asyncio.subprocess.PIPE
            )
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    async def ended(self) -> str:
        """Wait for the process to end by itself; return how it did."""
        assert self._process is not None, "start() comes first"
        code = await self._process.wait()
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"The {self.name} ended with {how}"

    async def keep_alive(self) -> None:
        """Restart the process whenever it dies or falls silent, and print one line each time."""
        loop = asyncio.get_running_loop()
        backoff_seconds = FIRST_BACKOFF_SECONDS
        while True:
            started = loop.time()
            how = await self._ended_or_killed()
            if loop.time() - started > STABLE_SECONDS:
                backoff_seconds = FIRST_BACKOFF_SECONDS
            self._say(f"{how}; starting it again in {backoff_seconds:g} s")
            await asyncio.sleep(backoff_seconds)
            backoff_seconds = min(2 * backoff_seconds, LAST_BACKOFF_SECONDS)
            await self.start()

    async def _ended_or_killed(self) -> str:
        """Wait for the process to end; kill it when it has been silent for too long."""
        assert self._process is not None, "start() comes first"
        await _first(self._process.wait(), self._silence())
        if self._process.returncode is None:
            seconds = SILENT_PROBES * PROBE_SECONDS
            self._say(f"The {self.name} has not answered for {seconds:g} s; killing it")
            self._process.kill()
        return await self.ended()

    async def _silence(self) -> None:
        """Wait until the process, which has answered before, does so no more.

        Probes are counted, not seconds: if this process was stopped itself, no child is to blame.
        """
        if self._answers is None:
            await asyncio.Event().wait()
            return
        num_silent, has_answered = 0, False
        while num_silent < SILENT_PROBES:
            if await self._answers():
                num_silent, has_answered = 0, True
                await asyncio.sleep(PROBE_SECONDS)
            elif has_answered:
                num_silent += 1

    async def stop(self) -> None:
        """Order the process to end, and kill it if it takes longer than it may."""
        if self._process is None:
            return
        assert self._process.stdin is not None, "children are started with a pipe"
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), self._stop_seconds)
        except TimeoutError:
            self._say(f"The {self.name} did not end within {self._stop_seconds:g} s; killing it")
            self._process.kill()
            await self._process.wait()


async def run_children(
    children: Sequence[Child], *, ready: Callable[[], Awaitable[None]], stop: asyncio.Event
) -> str | None:
    """Run `children` until `stop` is set, then stop them in reverse order of their start.

    `ready` returns once they serve; it is asked only once. Returns None after an ordered stop, or
    how a child ended if it did so before `ready` returned: then there is nothing to keep alive.
    """
    try:
        for child in children:
            await child.start()
        early = await _first(stop.wait(), ready(), *(child.ended() for child in children))
        if isinstance(early, str):
            return early
        await _first(stop.wait(), *(child.keep_alive() for child in children))
        return None
    finally:
        for child in reversed(children):
            await child.stop()


async def _first(*waits: Awaitable[object]) -> object:
    """The result of whichever ends first; the others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task.result() for task in tasks if task in done)
    finally:
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
