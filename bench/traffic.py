"""Load whose requests finish, are aborted in any state, lose their link, or are rejected."""

import asyncio
import random
from collections import Counter, deque
from dataclasses import dataclass, field
from time import perf_counter

from bench.counts import check_counts
from bench.engines import HANG_SECONDS, Engine
from bench.errors import BenchError
from bench.mix import NAMESPACES, Mix
from engine.client import (
    Admitted,
    EngineClient,
    EngineLost,
    EngineRecord,
    Event,
    Finished,
    GenerateRequest,
    Rejected,
    RequestStream,
    Tokens,
    connect_engine,
)

SLACK_SECONDS = 1.0
MOST_PROBE_SECONDS = 30.0  # between two steps, on a shared machine
PROBE_SECONDS = 0.25
READY_SECONDS = 60
MOST_LEASES_KNOWN = 500
# Of 15 requests three are aborted: after some seconds, soon after admission, at some token.
FATES = ("aborted", "aborted soon", "aborted at", "finished at", *["left alone"] * 11)


@dataclass(slots=True)
class TrackedRequest:
    """A request and what its client has seen of it."""

    request: GenerateRequest
    fate: str  # one of FATES
    ends_at: int  # number of tokens, for the fates that end at one
    sent_s: float = 0.0
    state: str = "waiting"  # or prefill, or decode
    num_tokens: int = 0
    aborted_s: float | None = None
    record: EngineRecord | None = None
    outcome: str = "link ended"


@dataclass(slots=True)
class Tally:
    """Counts and longest waits over the whole run."""

    outcomes: Counter[str] = field(default_factory=Counter)
    aborts: Counter[str] = field(default_factory=Counter)  # by the state of the request
    grants: Counter[str] = field(default_factory=Counter)
    num_relinks: int = 0
    num_unpinned: int = 0
    longest_probe_s: float = 0.0
    longest_queue_s: float = 0.0
    longest_abort_s: float = 0.0
    num_probes: int = 0
    num_probes_full: int = 0  # with at least nine tenths of the cap held


class Traffic:
    """Clients of one engine on two links, one of which is closed now and then."""

    def __init__(
        self,
        engine: Engine,
        mix: Mix,
        chance: random.Random,
        *,
        queue_wait_seconds: float,
        patience_seconds: float = 4.0,
    ) -> None:
        """Open the second link. A timed abort comes within `patience_seconds`."""
        self._engine, self._mix, self._chance = engine, mix, chance
        self._queue_wait_seconds = queue_wait_seconds
        self._patience_seconds = patience_seconds
        self._second_client: EngineClient = connect_engine(engine.url)
        self._lease_ids: deque[str] = deque(maxlen=MOST_LEASES_KNOWN)
        self._tracked: list[TrackedRequest] = []  # since the last idle moment
        self.tally = Tally()

    async def run(self, seconds: float, *, at_once: int) -> None:
        """Run a closed loop of `at_once` clients, then wait for every request to end."""
        end_s = perf_counter() + seconds
        watch = asyncio.create_task(self._watch())
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._disturb(end_s))
                for _ in range(at_once):
                    group.create_task(self._send_until(end_s))
        finally:
            watch.cancel()
            await asyncio.wait([watch])
        if not watch.cancelled() and (error := watch.exception()) is not None:
            raise error

    async def check_ended(self) -> None:
        """Check the journal against what the clients saw, and the waits. Raises BenchError."""
        ended, self._tracked = self._tracked, []
        records = await self._engine.client.lookup([each.request.request_id for each in ended])
        for tracked in ended:
            request_id = tracked.request.request_id
            if tracked.outcome == "link ended":
                if request_id in records and records[request_id] is None:
                    raise BenchError(f"{request_id} outlives its link")
            elif records.get(request_id) != tracked.record:
                raise BenchError(f"{request_id}: the journal has {records.get(request_id)}")
        tally = self.tally
        if tally.longest_probe_s > MOST_PROBE_SECONDS:
            raise BenchError(f"the engine took no step for {tally.longest_probe_s:.1f} s")
        most_s = 2 * tally.longest_probe_s + SLACK_SECONDS
        if tally.longest_queue_s > self._queue_wait_seconds + most_s:
            raise BenchError(f"a request waited {tally.longest_queue_s:.1f} s for admission")
        if tally.longest_abort_s > most_s:
            raise BenchError(f"an abort took {tally.longest_abort_s:.1f} s")

    async def unpin_all(self) -> None:
        """Unpin every lease of every tenant."""
        self.tally.num_unpinned += await self._engine.client.unpin(namespaces=NAMESPACES)

    async def close(self) -> None:
        """Close the second link."""
        await self._second_client.close()

    async def _send_until(self, end_s: float) -> None:
        while perf_counter() < end_s:
            tracked = TrackedRequest(
                self._mix.next(), self._chance.choice(FATES), self._chance.randint(1, 20)
            )
            self._tracked.append(tracked)
            try:
                async with asyncio.timeout(HANG_SECONDS):
                    await self._follow(tracked)
            except TimeoutError:
                raise BenchError(f"{tracked.request.request_id} hangs") from None
            except EngineLost:
                if self._engine.client.info is None:
                    raise BenchError(f"the engine ended: {self._engine.log()}") from None
            self.tally.outcomes[tracked.outcome] += 1
            if self._chance.random() < 0.05:
                await asyncio.sleep(self._chance.uniform(0, 1))

    async def _follow(self, tracked: TrackedRequest) -> None:
        """Send one request and read its events to the last one."""
        client = self._engine.client
        if self._chance.random() < 0.2:
            client = self._second_client
            await client.ready(READY_SECONDS)
        tracked.sent_s = perf_counter()
        stream = client.generate(tracked.request)
        timers: list[asyncio.TimerHandle] = []
        loop = asyncio.get_running_loop()

        def abort_in(most_seconds: float) -> None:
            delay = self._chance.uniform(0, most_seconds)
            timers.append(loop.call_later(delay, self._abort, tracked, stream))

        if tracked.fate == "aborted":
            abort_in(self._patience_seconds)
        try:
            async for event in stream:
                self._take(tracked, event)
                if tracked.fate == "aborted soon" and isinstance(event, Admitted):
                    abort_in(self._patience_seconds / 8)
                elif tracked.num_tokens >= tracked.ends_at and isinstance(event, Tokens):
                    self._end_at(tracked, stream)
        finally:
            for timer in timers:
                timer.cancel()

    def _abort(self, tracked: TrackedRequest, stream: RequestStream) -> None:
        if tracked.aborted_s is None:
            tracked.aborted_s = perf_counter()
            self.tally.aborts[tracked.state] += 1
            stream.abort()

    def _end_at(self, tracked: TrackedRequest, stream: RequestStream) -> None:
        if tracked.fate == "aborted at":
            self._abort(tracked, stream)
        elif tracked.fate == "finished at":
            stream.finish(tracked.ends_at)

    def _take(self, tracked: TrackedRequest, event: Event) -> None:
        match event:
            case Admitted():
                self._note_queue_wait(tracked)
                tracked.state = "prefill"
            case Tokens(_, token_ids):
                tracked.state = "decode"
                tracked.num_tokens += len(token_ids)
            case Finished(record=record, reason=reason):
                self._take_end(tracked, record, reason)
            case Rejected(code=code):
                self._note_queue_wait(tracked)
                tracked.outcome = code

    def _note_queue_wait(self, tracked: TrackedRequest) -> None:
        waited_s = perf_counter() - tracked.sent_s
        self.tally.longest_queue_s = max(self.tally.longest_queue_s, waited_s)

    def _take_end(self, tracked: TrackedRequest, record: EngineRecord | None, reason: str) -> None:
        request = tracked.request
        if tracked.aborted_s is not None:
            ended_s = perf_counter() - tracked.aborted_s
            self.tally.longest_abort_s = max(self.tally.longest_abort_s, ended_s)
        if reason == "error" or (reason == "aborted" and tracked.aborted_s is None):
            raise BenchError(f"{request.request_id} ended with {reason}")
        if (record is None) != (tracked.state == "waiting"):
            raise BenchError(f"{request.request_id} ended in {tracked.state} with {record}")
        tracked.outcome, tracked.record = reason, record
        if record is None:
            return
        check_counts(
            record, prompt_tokens=request.num_prompt_tokens, seen_tokens=tracked.num_tokens
        )
        if record.queued_ms >= self._queue_wait_seconds * 1_000:
            raise BenchError(f"{request.request_id} was admitted after {record.queued_ms} ms")
        for grant in record.grants:
            self.tally.grants[grant.reason or grant.outcome] += 1
            if grant.committed and grant.lease_id is not None:
                self._lease_ids.append(grant.lease_id)

    async def _disturb(self, end_s: float) -> None:
        """Unpin some leases, and close the second link with the requests on it, at random times."""
        while (left_s := end_s - perf_counter()) > 0:
            await asyncio.sleep(min(left_s, self._chance.expovariate(0.25)))
            kind = self._chance.random()
            if kind < 0.1:
                await self._second_client.close()
                self._second_client = connect_engine(self._engine.url)
                self.tally.num_relinks += 1
            elif kind < 0.2:
                name = self._chance.choice(NAMESPACES)
                self.tally.num_unpinned += await self._engine.client.unpin(namespaces=[name])
            elif self._lease_ids:
                ids = self._chance.choices(self._lease_ids, k=2)
                self.tally.num_unpinned += await self._engine.client.unpin(lease_ids=ids)

    async def _watch(self) -> None:
        """Read the stats periodically, to time the steps and to check the pin cap."""
        cap, tally = self._engine.info.pin_cap_blocks, self.tally
        while True:
            asked_s = perf_counter()
            stats = await self._engine.client.stats()
            tally.longest_probe_s = max(tally.longest_probe_s, perf_counter() - asked_s)
            held = int(stats["kv_blocks_pinned"] + stats["kv_blocks_reserved"])
            if held > cap:
                raise BenchError(f"{held} blocks pinned or reserved of {cap}")
            tally.num_probes += 1
            tally.num_probes_full += held >= cap * 9 // 10
            await asyncio.sleep(PROBE_SECONDS)
