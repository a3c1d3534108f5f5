"""Requests that end in every way: by themselves, aborted in any state, with their link, refused."""

import asyncio
import random
from collections import Counter, deque
from dataclasses import dataclass, field
from time import perf_counter

from bench.counts import BenchError, check_counts
from bench.engines import HANG_SECONDS, Engine
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
MOST_PROBE_SECONDS = 30.0  # between two steps, on a machine that others use too
PROBE_SECONDS = 0.25
READY_SECONDS = 60
MOST_LEASES_KNOWN = 500
# A fifth is aborted: after some seconds, soon after its admission, at some token.
FATES = ("aborted", "aborted soon", "aborted at", "finished at", *["left alone"] * 11)


@dataclass(slots=True)
class Ask:
    """One request as its client sees it."""

    request: GenerateRequest
    fate: str  # one of FATES
    ends_at: int  # tokens, where that is its fate
    sent_s: float = 0.0
    state: str = "waiting"  # then prefill, then decode
    num_tokens: int = 0
    aborted_s: float | None = None
    record: EngineRecord | None = None
    outcome: str = "link ended"


@dataclass(slots=True)
class Tally:
    """What happened, over the whole run."""

    outcomes: Counter[str] = field(default_factory=Counter)
    aborts: Counter[str] = field(default_factory=Counter)  # by the state that they met
    grants: Counter[str] = field(default_factory=Counter)
    num_relinks: int = 0
    num_unpinned: int = 0
    longest_probe_s: float = 0.0
    longest_queue_s: float = 0.0
    longest_abort_s: float = 0.0
    num_probes: int = 0
    num_probes_full: int = 0  # nine tenths of the cap or more held


class Traffic:
    """Clients of one engine: a link that stays and one that is closed now and then."""

    def __init__(
        self,
        engine: Engine,
        mix: Mix,
        chance: random.Random,
        *,
        queue_wait_seconds: float,
        patience_seconds: float = 4.0,
    ) -> None:
        """Open the second link. Who aborts a request does so within `patience_seconds`."""
        self._engine, self._mix, self._chance = engine, mix, chance
        self._queue_wait_seconds = queue_wait_seconds
        self._patience_seconds = patience_seconds
        self._fickle: EngineClient = connect_engine(engine.url)
        self._lease_ids: deque[str] = deque(maxlen=MOST_LEASES_KNOWN)
        self._asks: list[Ask] = []  # since the last idle moment
        self.tally = Tally()

    async def run(self, seconds: float, *, at_once: int) -> None:
        """Closed loop for a while, then to the end of every request."""
        end_s = perf_counter() + seconds
        watch = asyncio.create_task(self._watch())
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._disturb(end_s))
                for _ in range(at_once):
                    group.create_task(self._ask_until(end_s))
        finally:
            watch.cancel()
            await asyncio.wait([watch])
        if not watch.cancelled() and (error := watch.exception()) is not None:
            raise error

    async def check_ended(self) -> None:
        """The journal tells of each request what its client was told, and all in time."""
        asks, self._asks = self._asks, []
        records = await self._engine.client.lookup([ask.request.request_id for ask in asks])
        for ask in asks:
            request_id = ask.request.request_id
            if ask.outcome == "link ended":
                if request_id in records and records[request_id] is None:
                    raise BenchError(f"{request_id} outlives its link")
            elif records.get(request_id) != ask.record:
                raise BenchError(f"{request_id}: the journal has {records.get(request_id)}")
        tally = self.tally
        if tally.longest_probe_s > MOST_PROBE_SECONDS:
            raise BenchError(f"the engine took no step for {tally.longest_probe_s:.1f} s")
        most_s = 2 * tally.longest_probe_s + SLACK_SECONDS
        if tally.longest_queue_s > self._queue_wait_seconds + most_s:
            raise BenchError(f"a request waited {tally.longest_queue_s:.1f} s for its answer")
        if tally.longest_abort_s > most_s:
            raise BenchError(f"an abort took {tally.longest_abort_s:.1f} s")

    async def unpin_all(self) -> None:
        """End every lease that there can be."""
        self.tally.num_unpinned += await self._engine.client.unpin(namespaces=NAMESPACES)

    async def close(self) -> None:
        """End the second link."""
        await self._fickle.close()

    async def _ask_until(self, end_s: float) -> None:
        while perf_counter() < end_s:
            ask = Ask(self._mix.next(), self._chance.choice(FATES), self._chance.randint(1, 20))
            self._asks.append(ask)
            try:
                async with asyncio.timeout(HANG_SECONDS):
                    await self._follow(ask)
            except TimeoutError:
                raise BenchError(f"{ask.request.request_id} hangs") from None
            except EngineLost:
                if self._engine.client.info is None:
                    raise BenchError(f"the engine ended: {self._engine.log()}") from None
            self.tally.outcomes[ask.outcome] += 1
            if self._chance.random() < 0.05:
                await asyncio.sleep(self._chance.uniform(0, 1))

    async def _follow(self, ask: Ask) -> None:
        """One request to its last event."""
        client = self._engine.client
        if self._chance.random() < 0.2:
            client = self._fickle
            await client.ready(READY_SECONDS)
        ask.sent_s = perf_counter()
        stream = client.generate(ask.request)
        timers: list[asyncio.TimerHandle] = []
        loop = asyncio.get_running_loop()

        def abort_in(most_seconds: float) -> None:
            delay = self._chance.uniform(0, most_seconds)
            timers.append(loop.call_later(delay, self._abort, ask, stream))

        if ask.fate == "aborted":
            abort_in(self._patience_seconds)
        try:
            async for event in stream:
                self._take(ask, event)
                if ask.fate == "aborted soon" and isinstance(event, Admitted):
                    abort_in(self._patience_seconds / 8)
                elif ask.num_tokens >= ask.ends_at and isinstance(event, Tokens):
                    self._end_at(ask, stream)
        finally:
            for timer in timers:
                timer.cancel()

    def _abort(self, ask: Ask, stream: RequestStream) -> None:
        if ask.aborted_s is None:
            ask.aborted_s = perf_counter()
            self.tally.aborts[ask.state] += 1
            stream.abort()

    def _end_at(self, ask: Ask, stream: RequestStream) -> None:
        if ask.fate == "aborted at":
            self._abort(ask, stream)
        elif ask.fate == "finished at":
            stream.finish(ask.ends_at)

    def _take(self, ask: Ask, event: Event) -> None:
        match event:
            case Admitted():
                self._note_answer(ask)
                ask.state = "prefill"
            case Tokens(_, token_ids):
                ask.state = "decode"
                ask.num_tokens += len(token_ids)
            case Finished(record=record, reason=reason):
                self._take_end(ask, record, reason)
            case Rejected(code=code):
                self._note_answer(ask)
                ask.outcome = code

    def _note_answer(self, ask: Ask) -> None:
        waited_s = perf_counter() - ask.sent_s
        self.tally.longest_queue_s = max(self.tally.longest_queue_s, waited_s)

    def _take_end(self, ask: Ask, record: EngineRecord | None, reason: str) -> None:
        request = ask.request
        if ask.aborted_s is not None:
            ended_s = perf_counter() - ask.aborted_s
            self.tally.longest_abort_s = max(self.tally.longest_abort_s, ended_s)
        if reason == "error" or (reason == "aborted" and ask.aborted_s is None):
            raise BenchError(f"{request.request_id} ended with {reason}")
        if (record is None) != (ask.state == "waiting"):
            raise BenchError(f"{request.request_id} ended in {ask.state} with {record}")
        ask.outcome, ask.record = reason, record
        if record is None:
            return
        check_counts(record, prompt_tokens=request.num_prompt_tokens, seen_tokens=ask.num_tokens)
        if record.queued_ms >= self._queue_wait_seconds * 1_000:
            raise BenchError(f"{request.request_id} was admitted after {record.queued_ms} ms")
        for grant in record.grants:
            self.tally.grants[grant.reason or grant.outcome] += 1
            if grant.committed and grant.lease_id is not None:
                self._lease_ids.append(grant.lease_id)

    async def _disturb(self, end_s: float) -> None:
        """End some leases, and the second link with whatever runs on it."""
        while (left_s := end_s - perf_counter()) > 0:
            await asyncio.sleep(min(left_s, self._chance.expovariate(0.25)))
            kind = self._chance.random()
            if kind < 0.1:
                await self._fickle.close()
                self._fickle = connect_engine(self._engine.url)
                self.tally.num_relinks += 1
            elif kind < 0.2:
                name = self._chance.choice(NAMESPACES)
                self.tally.num_unpinned += await self._engine.client.unpin(namespaces=[name])
            elif self._lease_ids:
                ids = self._chance.choices(self._lease_ids, k=2)
                self.tally.num_unpinned += await self._engine.client.unpin(lease_ids=ids)

    async def _watch(self) -> None:
        """Ask for stats all the time: they come between two steps, and the cap always holds."""
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
