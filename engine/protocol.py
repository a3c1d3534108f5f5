"""The protocol's types: requests from a client; events, records and reports from the engine.

Every value is plain data. `engine.wire` converts it to maps and back, field by field, for frames
and for the journal; `engine.client` re-exports what a client needs. A new fact is declared only
here and set where it is counted. Token counts are exact, never rounded to blocks; times are
milliseconds; a prompt is packed little-endian u32.
"""

from dataclasses import dataclass, field
from typing import Literal

PROTOCOL_VERSION = 1
# In a field's metadata: its key in frames and journal lines, where that is not its name.
WIRE_KEY = "wire_key"

GrantOutcome = Literal["granted", "refreshed", "refused"]
FinishReason = Literal[
    "stop_token",  # the model ended its turn; the stop token is the last output token
    "max_tokens",  # the request's output budget is used up
    "finished",  # the client called finish(output_tokens=k), for example at a stop string
    "aborted",  # the client called abort, or its link ended
    "error",  # this request failed in the engine after admission
    "engine_lost",  # reconstructed from the journal of an engine that died
]
RejectCode = Literal[
    "invalid_request",  # malformed, out of vocabulary, duplicate id, no namespace
    "prompt_too_long",  # longer than the context window
    "pool_too_small",  # can never fit this engine's KV pool
    "overloaded",  # the queue is full, or the request waited too long in it
]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How output tokens are chosen. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """A prefix of exactly `num_tokens` tokens to pin for `ttl_ms` more.

    write     True: a new cache entry, which needs a grant. False: a live entry that this request
              reads; its lease is refreshed, or restored at the operator's cost if it was lost
    persist   keep a copy of the lease on disk, so that it survives a restart of the engine
    """

    num_tokens: int = field(metadata={WIRE_KEY: "tokens"})
    ttl_ms: int
    write: bool
    persist: bool = False


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt to continue.

    prompt_token_ids   packed little-endian u32
    namespace          the opaque isolation key, never empty
    read_tokens        length of the prefix that the client bills as a cache read; 0: none
    breakpoints        strictly ascending by `num_tokens`
    max_tokens         0: compute the prompt and produce no output
    ignore_eos         continue to `max_tokens`; `stop_token_ids` have no effect
    """

    request_id: str
    namespace: bytes
    prompt_token_ids: bytes = field(metadata={WIRE_KEY: "prompt"})
    max_tokens: int
    read_tokens: int = 0
    sampling: Sampling = Sampling()
    stop_token_ids: tuple[int, ...] = ()
    breakpoints: tuple[Breakpoint, ...] = ()
    ignore_eos: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens in the prompt."""
        return len(self.prompt_token_ids) // 4


@dataclass(frozen=True, slots=True)
class Grant:
    """Whether the engine pins one breakpoint's prefix; final for billing.

    reason      of a refusal: `quota`, `capacity`, `too_short` or `caching_disabled`
    committed   True once the step that reached exactly `num_tokens` has been committed
    lease_id    known at once if refreshed, from the commit on if granted
    """

    num_tokens: int = field(metadata={WIRE_KEY: "tokens"})
    write: bool
    outcome: GrantOutcome
    reason: str | None = None
    committed: bool = False
    lease_id: str | None = None


@dataclass(frozen=True, slots=True)
class Admitted:
    """The request left the queue: its grants and the length of its reused prefix are final."""

    request_id: str
    grants: tuple[Grant, ...]
    tokens_reused: int


@dataclass(frozen=True, slots=True)
class Committed:
    """The prefix of exactly `num_tokens` tokens is computed and pinned."""

    request_id: str
    num_tokens: int = field(metadata={WIRE_KEY: "tokens"})


@dataclass(frozen=True, slots=True)
class Tokens:
    """Output tokens of one step, the stop token included."""

    request_id: str
    token_ids: tuple[int, ...] = field(metadata={WIRE_KEY: "ids"})


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """What the engine did for one admitted request; kept in the journal, sent with its end.

    The four facts add up to the prompt (docs/words.md):
    `prompt_tokens = tokens_reused_promised + tokens_reused_gift + tokens_read_recomputed
    + tokens_computed`. They are frozen at first admission and never change on preemption.
    """

    request_id: str
    engine_boot_id: str
    prompt_tokens: int
    read_tokens: int
    tokens_reused_promised: int
    tokens_reused_gift: int
    tokens_read_recomputed: int
    tokens_computed: int
    grants: tuple[Grant, ...]
    output_tokens: int
    overrun_tokens: int
    finish_reason: FinishReason
    tokens_recomputed_preemption: int = 0
    num_preemptions: int = 0
    reads_by_tier: dict[str, int] = field(default_factory=dict)
    queued_ms: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of an admitted request, or of one that ended in the queue (`record` None)."""

    request_id: str
    reason: FinishReason
    record: EngineRecord | None
    message: str | None = None


@dataclass(frozen=True, slots=True)
class Rejected:
    """The only event of a request that was never admitted; it has no record."""

    request_id: str
    code: RejectCode
    message: str


ReportReason = Literal[
    "refreshed",  # a request read or wrote the prefix again; the lease continues
    "expired",  # it reached its deadline
    "unpinned",  # a client ended it
    "lost",  # its last copy was damaged; later readers are not charged more
    "dropped",  # the engine ended it to resolve a stall
    "stopped",  # the engine stopped; a lease that persists continues in the next process
]


@dataclass(frozen=True, slots=True)
class LeaseReport:
    """What a lease has cost so far, as totals that never decrease: the largest report counts.

    request_id, num_tokens   the breakpoint that the lease serves
    tier, num_bytes          the fastest tier that holds it, and the bytes that it pins, as of now
    contended_block_ms       pinned blocks x milliseconds in which, without the lease, they would
                             have been evicted
    idle_block_ms            the same, in which they would have stayed cached anyway

    A block that several leases pin is counted for one of them.
    """

    lease_id: str
    request_id: str
    num_tokens: int = field(metadata={WIRE_KEY: "tokens"})
    reason: ReportReason
    tier: str
    num_bytes: int
    idle_block_ms: int
    contended_block_ms: int


Event = Admitted | Committed | Tokens | Finished | Rejected


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """The engine's model and limits, sent as the first frame of every link.

    `engine_id` is its journal's, so it stays the same when the engine restarts.

    `max_request_tokens` is the longest prompt plus output that can ever fit the KV pool beside the
    pins; `default_sampling` comes from the model folder's generation_config.json (absent:
    temperature 1.0).
    """

    engine_id: str
    engine_boot_id: str
    model_id: str
    weights_digest: str
    vocab_size: int
    max_model_len: int
    max_request_tokens: int
    block_size: int
    num_blocks: int
    pin_cap_blocks: int
    dtype: str
    device: str
    stop_token_ids: tuple[int, ...]
    default_sampling: Sampling
