"""A Runner that says what a test wrote down; leases, admission and journal stay the real core's."""

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from engine.plan import Plan, Row

Script = Sequence[int] | Callable[[bytes], Sequence[int]]


class ScriptedRunner:
    """Emits scripted token ids, the last one again and again once the script is used up.

    script           output ids, or a function from the prompt (packed little-endian u32) to them
    pace_seconds     how long a step takes that emits tokens
    first_seconds    how long a step takes that emits a request's first token
    fail_after       the step that would emit output token number `fail_after` (from 0) raises
    gate             while it is clear, a step that would emit a first token waits, and the whole
                     engine with it; `at_gate` is set once it does

    Its KV cache holds the tokens themselves, so that a function sees the whole prompt, reused
    blocks included.
    """

    def __init__(
        self,
        script: Script = (7,),
        *,
        pace_seconds: float = 0.0,
        first_seconds: float = 0.0,
        fail_after: int | None = None,
        block_size: int = 16,
    ) -> None:
        self.script = script
        self.pace_seconds = pace_seconds
        self.prefill_seconds = 0.0  # of a step that samples nothing
        self.first_seconds = first_seconds
        self.fail_after = fail_after
        self.gate = threading.Event()
        self.gate.set()
        self.at_gate = threading.Event()
        self.num_steps = 0
        self._pause = threading.Event()
        self._block_size = block_size
        self._blocks: defaultdict[int, np.ndarray] = defaultdict(self._empty_block)
        self._outputs: dict[str, Sequence[int]] = {}

    def execute(self, plan: Plan) -> list[int]:
        self.num_steps += 1
        for copy in plan.copies:
            source, target = self._blocks[copy.source], self._blocks[copy.target]
            target[: copy.num_slots] = source[: copy.num_slots]
        for row in plan.rows:
            for position, token in enumerate(row.token_ids, start=row.start):
                block, slot = divmod(position, self._block_size)
                self._blocks[int(row.block_table[block])][slot] = token
        sampled = [row for row in plan.rows if row.samples]
        if any(row.output_index == 0 for row in sampled):
            if not self.gate.is_set():
                self.at_gate.set()
                self.gate.wait()
            self._pause.wait(self.first_seconds)
        self._pause.wait(self.pace_seconds if sampled else self.prefill_seconds)
        if any(row.output_index == self.fail_after for row in sampled):
            raise RuntimeError("the script says: fail")
        return [self._token(row) for row in sampled]

    def hurry(self) -> None:
        """End every pause, now and from now on, and open the gate."""
        self._pause.set()
        self.gate.set()

    def _token(self, row: Row) -> int:
        outputs = self._outputs.get(row.request_id)
        if outputs is None:
            outputs = self.script(self._prompt(row)) if callable(self.script) else self.script
            self._outputs[row.request_id] = outputs
        return outputs[min(row.output_index, len(outputs) - 1)]

    def _prompt(self, row: Row) -> bytes:
        tokens = np.concatenate([self._blocks[int(block)] for block in row.block_table])
        return tokens[: row.start + len(row.token_ids)].astype("<u4").tobytes()

    def _empty_block(self) -> np.ndarray:
        return np.zeros(self._block_size, dtype=np.uint32)
