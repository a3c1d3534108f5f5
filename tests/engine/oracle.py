"""A runner whose KV slots say whose they are, and random requests to try the scheduler with.

A real slot's K/V depends on the token, on everything before it, and must belong to one namespace.
So the oracle's slot holds (namespace, token, history), where history is a hash of all tokens up to
and including this one. Any stale, foreign, shifted or unwritten slot that a row would attend to is
an AssertionError in the step that would have used it.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.plan import BlockCopy, BlockLoad, Plan, Row
from engine.protocol import Breakpoint, EngineRecord, GenerateRequest, LeaseReport
from engine.tiers.lease_store import LeaseStore

Slot = tuple[bytes, int, int] | None


def pack(ids: Iterable[int]) -> bytes:
    return np.array(list(ids), dtype="<u4").tobytes()


def unpack(prompt: bytes) -> list[int]:
    return np.frombuffer(prompt, dtype="<u4").tolist()


def next_history(history: int, token: int) -> int:
    return hash((history, token))


class OracleRunner:
    """Checks every slot that a row attends to; samples a pure function of the row's history."""

    def __init__(self, config: EngineConfig, *, num_tokens_sampled: int | None = None) -> None:
        self.block_size = config.block_size
        self.vocab_size = num_tokens_sampled or config.vocab_size
        self.slots: list[list[Slot]] = [
            [None] * config.block_size for _ in range(config.num_blocks)
        ]
        self.contents: dict[str, list[Slot]] = {}
        self.fails = False  # whatever it executes
        self.fails_loading = False  # whatever loads
        self.failing: set[str] = set()  # requests whose rows raise
        self.not_finite: set[str] = set()  # requests whose logits are no numbers
        self.fault: AssertionError | None = None
        self.num_copies = 0
        self.num_loads = 0
        self.plans: list[Plan] = []

    def expect(self, request: GenerateRequest) -> None:
        """Learn what the slots of a request must hold."""
        content = self.contents[request.request_id] = []
        for token in unpack(request.prompt_token_ids):
            self._extend(content, request.namespace, token)

    def execute(self, plan: Plan) -> list[int | None]:
        try:
            return self._execute(plan)
        except AssertionError as fault:
            self.fault = fault  # the core survives any runner, so the bench must look here
            raise

    def _execute(self, plan: Plan) -> list[int | None]:
        self.plans.append(plan)
        is_broken = self.fails or (self.fails_loading and bool(plan.loads))
        sources = {copy.source for copy in plan.copies}
        fresh = {copy.target for copy in plan.copies} | set(self._started_blocks(plan))
        fresh |= {block for load in plan.loads for block in load.blocks}
        assert not sources & fresh, f"a copy's source is given away in its step: {sources & fresh}"
        for load in plan.loads:
            self._load(load, is_broken=is_broken)
        if plan.loads and is_broken:  # a load broke off: its blocks are empty
            raise RuntimeError("injected failure")
        for copy in plan.copies:
            self._copy(copy)
        for row in plan.rows:
            self._check(row, row.start, "before the step")
        for row in plan.rows:
            self._write(row, is_broken=is_broken)
        if is_broken or any(row.request_id in self.failing for row in plan.rows):
            raise RuntimeError("injected failure")
        for row in plan.rows:
            self._check(row, row.start + len(row.token_ids), "after the step")
        return [
            None if row.request_id in self.not_finite else self._sample(row)
            for row in plan.rows
            if row.samples
        ]

    def snapshot(self, blocks: Sequence[int], num_tokens: int) -> list[list[Slot]]:
        """What a tier keeps of the first `num_tokens` slots of `blocks`."""
        copied = [list(self.slots[block]) for block in blocks]
        num_tail = num_tokens - (len(blocks) - 1) * self.block_size
        copied[-1][num_tail:] = [None] * (self.block_size - num_tail)
        assert all(slot is not None for block in copied[:-1] for slot in block), "copied too early"
        return copied

    def continuation(self, request: GenerateRequest, num_tokens: int) -> list[int]:
        """What the first `num_tokens` outputs of a request must be."""
        history = 0
        for token in unpack(request.prompt_token_ids):
            history = next_history(history, token)
        output = []
        for _ in range(num_tokens):
            output.append(history % self.vocab_size)
            history = next_history(history, output[-1])
        return output

    def _extend(self, content: list[Slot], namespace: bytes, token: int) -> None:
        history = content[-1][2] if content else 0
        content.append((namespace, token, next_history(history, token)))

    def _copy(self, copy: BlockCopy) -> None:
        held = self.slots[copy.source][: copy.num_slots]
        assert None not in held, f"copies unwritten slots: {copy}"
        # A fresh block starts poisoned: whatever its last user left must not be read.
        self.slots[copy.target] = held + [None] * (self.block_size - copy.num_slots)
        self.num_copies += 1

    def _load(self, load: BlockLoad, *, is_broken: bool) -> None:
        for block, held in zip(load.blocks, load.payload[load.skip :], strict=False):
            self.slots[block] = [None] * self.block_size if is_broken else list(held)
            self.num_loads += 1

    def _started_blocks(self, plan: Plan) -> Iterable[int]:
        """The blocks that rows write from their first slot on."""
        for row in plan.rows:
            first = -(-row.start // self.block_size)
            yield from row.block_table[first:].tolist()

    def _check(self, row: Row, stop: int, when: str) -> None:
        content = self.contents[row.request_id]
        size = self.block_size
        assert len(row.block_table) == -(-(row.start + len(row.token_ids)) // size), "table length"
        for number, block in enumerate(row.block_table.tolist()):
            expected = content[number * size : min(stop, (number + 1) * size)]
            actual = self.slots[block][: len(expected)]
            assert actual == expected, (
                f"wrong KV {when}: {row.request_id} block {number} (physical {block}) "
                f"holds {actual}, expected {expected}"
            )

    def _write(self, row: Row, *, is_broken: bool) -> None:
        content = self.contents[row.request_id]
        for position, token in enumerate(row.token_ids.tolist(), row.start):
            assert content[position][1] == token, f"wrong token in a row: {row}"
            assert content[position][0] == row.namespace, f"wrong namespace in a row: {row}"
            block, slot = row.block_table[position // self.block_size], position % self.block_size
            if slot == 0:
                self.slots[block] = [None] * self.block_size
            self.slots[block][slot] = None if is_broken else content[position]

    def _sample(self, row: Row) -> int:
        content = self.contents[row.request_id]
        assert row.start + len(row.token_ids) == len(content), (
            "sampled before the end of its tokens"
        )
        token = content[-1][2] % self.vocab_size
        self._extend(content, row.namespace, token)
        return token


class ListJournal:
    """Keeps what the core journals, in order."""

    def __init__(self) -> None:
        self.opened: dict[str, EngineRecord] = {}
        self.closed: dict[str, EngineRecord] = {}
        self.commits: dict[str, list[int]] = {}
        self.outputs: dict[str, int] = {}
        self.reports: list[LeaseReport] = []

    def admitted(self, record: EngineRecord) -> None:
        assert record.request_id not in self.opened, "admitted twice"
        self.opened[record.request_id] = record

    def committed(self, request_id: str, num_tokens: int) -> None:
        assert request_id in self.opened, "committed before admission"
        self.commits.setdefault(request_id, []).append(num_tokens)

    def produced(self, request_id: str, output_tokens: int) -> None:
        assert output_tokens == self.outputs.get(request_id, 0) + 1, "a gap in the output"
        self.outputs[request_id] = output_tokens

    def reported(self, report: LeaseReport) -> None:
        self.reports.append(report)

    def finished(self, record: EngineRecord) -> None:
        assert record.request_id not in self.closed, "finished twice"
        self.closed[record.request_id] = record


def small_config(**changes: object) -> EngineConfig:
    values: dict[str, object] = {
        "block_size": 4,
        "num_blocks": 32,
        "max_model_len": 80,
        "vocab_size": 1000,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "pin_cap_blocks": 12,
        "namespace_quota_blocks": 12,
        "lease_grace_ms": 50,
        "min_shared_tokens": 16,
    }
    return EngineConfig(**(values | changes))


class Bench:
    """A core on an oracle runner, with a clock that is moved by hand."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        store: Callable[[OracleRunner], LeaseStore] | None = None,
        **runner: int,
    ) -> None:
        self.config = config
        self.runner = OracleRunner(config, **runner)
        self.journal = ListJournal()
        self.store = store or (lambda runner: LeaseStore())
        self.num_boots = 0
        self.now_ms = 1_000
        self.boot()

    def boot(self) -> None:
        """Start an engine; the one before it is gone, and so is all that was in its blocks."""
        boot_id = f"boot{self.num_boots or ''}"
        self.num_boots += 1
        self.runner.slots = [[None] * self.config.block_size for _ in self.runner.slots]
        self.core = EngineCore(
            self.config,
            self.runner,
            boot_id=boot_id,
            journal=self.journal,
            store=self.store(self.runner),
        )

    def submit(self, request: GenerateRequest):
        rejected = self.core.submit(request, self.now_ms)
        if rejected is None:
            self.runner.expect(request)
        return rejected

    def step(self, advance_ms: int = 1):
        self.now_ms += advance_ms
        events = self.core.step(self.now_ms)
        if self.runner.fault is not None:
            raise self.runner.fault
        stalled = self.core.scheduler.counts["steps_stalled_total"]
        assert stalled == 0, "a step with work to do did nothing"
        self.core.check_integrity()
        return events

    def drain(self, max_steps: int = 500):
        """Step until nothing is left and return all events."""
        events = []
        for _ in range(max_steps):
            if not self.core.has_work:
                return events
            events += self.step()
        raise AssertionError(f"still busy after {max_steps} steps: {self.core.stats()}")

    def run(self, request: GenerateRequest):
        """Submit one request and return all events until the core is idle."""
        assert self.submit(request) is None
        return self.drain()


def ask(request_id: str, ids: Iterable[int], **fields: object) -> GenerateRequest:
    values: dict[str, object] = {"namespace": b"tenant-a", "max_tokens": 1}
    return GenerateRequest(request_id=request_id, prompt_token_ids=pack(ids), **(values | fields))


def random_config(chance: random.Random) -> EngineConfig:
    # In a tight one, prompts take many steps while others decode: preemption meets reservations.
    is_tight = chance.random() < 0.5
    block_size = 4 if is_tight else chance.choice([4, 4, 8, 16])
    num_blocks = chance.randint(12, 24 if is_tight else 60)
    pin_cap = chance.randint(2, num_blocks // 2) if is_tight else chance.randint(0, num_blocks - 6)
    return EngineConfig(
        block_size=block_size,
        num_blocks=num_blocks,
        max_model_len=chance.randint(4, 20) * block_size,
        vocab_size=1000,
        max_num_seqs=chance.randint(1, 10),
        max_num_batched_tokens=chance.randint(4, 8) if is_tight else chance.choice([16, 33, 200]),
        pin_cap_blocks=pin_cap,
        namespace_quota_blocks=chance.randint(pin_cap // 2, pin_cap),
        min_lease_tokens=chance.choice([1, 1, 1, 6]),
        lease_grace_ms=50,
        max_queue=chance.choice([10, 100, 100]),
        max_queue_wait_ms=chance.choice([300, 60_000, 60_000]),
        enable_prefix_caching=chance.random() < 0.95,
        enable_chunked_prefill=chance.random() < 0.85,
        step_target_ms=chance.choice([None, 6]),
        max_bypass_ms=chance.choice([10, 5_000]),
        min_shared_tokens=chance.choice([block_size, 2 * block_size, 256]),
        max_defer_ms=chance.choice([15, 30_000]),
        scheduling=chance.choice(["continuous"] * 7 + ["static"]),
        kv_layout=chance.choice(["paged"] * 7 + ["contiguous"]),
    )


def random_requests(
    chance: random.Random, config: EngineConfig, *, num_requests: int
) -> list[GenerateRequest]:
    """Requests that share prefixes and breakpoints with one another, also across namespaces."""
    longest = config.max_request_tokens
    documents = [[chance.randrange(1000) for _ in range(longest)] for _ in range(2)]
    favourites = [chance.randint(1, longest) for _ in range(4)]
    requests = []
    for number in range(num_requests):
        if requests and chance.random() < 0.3:  # a burst: one prompt several times at once
            requests.append(replace(requests[-1], request_id=f"req_{number}"))
            continue
        num_tokens = chance.randint(1, chance.choice([longest // 2, longest + 1]))  # some: too long
        num_shared = min(num_tokens, chance.choice([0, *favourites, longest]))
        suffix = [chance.randrange(3) for _ in range(num_tokens - num_shared)]
        candidates = [chance.randint(1, num_tokens)] * chance.randint(0, 1)
        candidates += [tokens for tokens in favourites if tokens <= num_tokens]
        chosen = chance.sample(candidates, min(len(candidates), chance.randint(0, 4)))
        breakpoints = tuple(
            Breakpoint(
                tokens,
                chance.choice([0, 20, 200, 1_000, 4_000]),
                write=chance.random() < 0.7,
                persist=chance.random() < 0.5,
            )
            for tokens in sorted(set(chosen))
        )
        requests.append(
            ask(
                f"req_{number}",
                chance.choice(documents)[:num_shared] + suffix,
                namespace=chance.choice([b"tenant-a", b"tenant-a", b"tenant-b"]),
                max_tokens=chance.choice([0, 1, 8, 30, 400, 400]),
                read_tokens=max((b.num_tokens for b in breakpoints if not b.write), default=0),
                stop_token_ids=(chance.randrange(200),),
                breakpoints=breakpoints,
                ignore_eos=chance.random() < 0.1,
            )
        )
    return requests
