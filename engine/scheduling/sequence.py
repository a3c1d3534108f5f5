"""A sequence: one request's token ids, block table, grants and record, from submit to its end.

tokens    [ prompt ............................ | output ....... ]
            0                  num_computed       num_prompt      num_tokens
table     [ block 0 | block 1 | ... ]   holds the KV of positions 0 .. num_computed - 1
"""

from dataclasses import dataclass, replace

import numpy as np

from engine.blocks.prefix_index import TOKEN_DTYPE, Match, PrefixChain
from engine.config import EngineConfig
from engine.lease_types import Reservation
from engine.plan import Row
from engine.protocol import EngineRecord, FinishReason, GenerateRequest, Grant


@dataclass(frozen=True, slots=True)
class Deferral:
    """The wait of a sequence for the first `num_tokens` tokens, which a running one will commit."""

    leader: "Sequence"
    num_tokens: int
    until_ms: int

    def is_pending(self) -> bool:
        """Whether the leader is running and has not committed the tokens."""
        # Only running sequences have blocks: a leader that ended or was preempted has none.
        return bool(self.leader.blocks) and self.leader.num_computed < self.num_tokens


class Sequence:
    """One request from submit to end. It survives preemption with everything but its blocks."""

    def __init__(
        self, request: GenerateRequest, config: EngineConfig, *, max_tokens: int, submitted_ms: int
    ) -> None:
        """Start waiting; the output is limited to `max_tokens`."""
        self.request = request
        self.max_tokens = max_tokens
        self.submitted_ms = submitted_ms
        self.num_prompt = self.num_tokens = request.num_prompt_tokens
        self.capacity = self.num_prompt + max_tokens
        self._token_ids = np.empty(self.capacity, dtype=TOKEN_DTYPE)
        self._token_ids[: self.num_prompt] = np.frombuffer(
            request.prompt_token_ids, dtype=TOKEN_DTYPE
        )
        self.chain = PrefixChain(request.namespace, self._token_ids, config.block_size)
        self._blocks_for = config.blocks_for

        self.num_computed = 0
        self.num_reused = 0  # of those, reused when it last started
        self.blocks: list[int] = []
        self._block_table = np.empty(config.blocks_for(self.capacity), dtype=np.int32)

        self.deferral: Deferral | None = None
        self.reservation: Reservation | None = None
        self.grants: list[Grant] = []
        self.uncommitted: list[int] = []  # indices of the grants not committed yet, ascending
        self._facts: EngineRecord | None = None
        self.start_number = 0  # its place in the order of first admission
        self.num_preemptions = 0
        self.tokens_recomputed_preemption = 0

    @property
    def request_id(self) -> str:
        """The id that the client chose."""
        return self.request.request_id

    @property
    def was_admitted(self) -> bool:
        """Whether the request has left the queue once, and so has a record."""
        return self._facts is not None

    def is_deferred(self, now_ms: int) -> bool:
        """Whether it waits for tokens that a running sequence will commit."""
        wait = self.deferral
        return wait is not None and wait.is_pending() and now_ms < wait.until_ms

    @property
    def num_uncomputed(self) -> int:
        """Tokens of the prompt and output whose KV is not computed yet."""
        return self.num_tokens - self.num_computed

    @property
    def num_output(self) -> int:
        """Tokens produced so far."""
        return self.num_tokens - self.num_prompt

    @property
    def last_token(self) -> int:
        """The newest token."""
        return int(self._token_ids[self.num_tokens - 1])

    def is_stopped(self) -> bool:
        """Whether the newest token ends the output."""
        return not self.request.ignore_eos and self.last_token in self.request.stop_token_ids

    def append(self, token: int) -> None:
        """Add one output token, not computed yet."""
        self._token_ids[self.num_tokens] = token
        self.num_tokens += 1

    def add_block(self, block: int) -> None:
        """Append a block to the table."""
        self._block_table[len(self.blocks)] = block
        self.blocks.append(block)

    def commit_next_grant(self, lease_id: str | None) -> None:
        """Mark the first uncommitted grant as committed."""
        index = self.uncommitted.pop(0)
        self.grants[index] = replace(self.grants[index], committed=True, lease_id=lease_id)

    def tokens_to_next_cut(self) -> int:
        """Return how many tokens are left to compute, up to the next uncommitted breakpoint."""
        for index in self.uncommitted:
            if (length := self.grants[index].num_tokens) > self.num_computed:
                return length - self.num_computed
        return self.num_tokens - self.num_computed

    def row(self, num_new: int) -> Row:
        """Return the row that computes the next `num_new` tokens."""
        stop = self.num_computed + num_new
        return Row(
            request_id=self.request.request_id,
            namespace=self.request.namespace,
            token_ids=self._token_ids[self.num_computed : stop],
            start=self.num_computed,
            block_table=self._block_table[: self._blocks_for(stop)],
            samples=stop == self.num_tokens and self.num_output < self.max_tokens,
            sampling=self.request.sampling,
            output_index=self.num_output,
        )

    def freeze(self, match: Match, *, boot_id: str, now_ms: int) -> None:
        """Open the record at first admission, when the matched blocks are attached."""
        prompt, read, reused = self.num_prompt, self.request.read_tokens, match.num_tokens
        self._facts = EngineRecord(
            request_id=self.request_id,
            engine_boot_id=boot_id,
            prompt_tokens=prompt,
            read_tokens=read,
            tokens_reused_promised=min(reused, read),
            tokens_reused_gift=max(0, reused - read),
            tokens_read_recomputed=max(0, read - reused),
            tokens_computed=prompt - max(reused, read),
            grants=tuple(self.grants),
            output_tokens=0,
            overrun_tokens=0,
            finish_reason="engine_lost",  # until a later record replaces it
            reads_by_tier=match.tokens_by_tier(),
            queued_ms=now_ms - self.submitted_ms,
        )

    def admission_record(self) -> EngineRecord:
        """Return the record as it was at first admission."""
        assert self._facts is not None, "no record before admission"
        return self._facts

    def final_record(self, reason: FinishReason, output_tokens: int) -> EngineRecord:
        """Return the record at the end; output past `output_tokens` was overrun."""
        return replace(
            self.admission_record(),
            grants=tuple(self.grants),
            output_tokens=output_tokens,
            overrun_tokens=self.num_output - output_tokens,
            finish_reason=reason,
            tokens_recomputed_preemption=self.tokens_recomputed_preemption,
            num_preemptions=self.num_preemptions,
        )
