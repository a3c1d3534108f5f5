"""EngineConfig: the limits and modes of one engine, as its operator chose them."""

from dataclasses import dataclass
from typing import Literal

Scheduling = Literal["continuous", "static"]
KVLayout = Literal["paged", "contiguous"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One engine's limits and modes. Sizes are in tokens or blocks, times in milliseconds.

    block_size                   tokens a KV block; also the unit of the prefix index
    num_blocks                   blocks in the KV pool
    max_model_len                longest prompt plus output the model accepts
    max_num_seqs                 sequences running at once
    max_num_batched_tokens       token budget of one step
    step_target_ms               how long a step with a stream and a prompt should take; None: as
                                 long as its token budget takes
    pin_cap_blocks               most distinct blocks that leases may pin; engine.compute.memory
                                 chooses it so that one whole context fits beside them
    namespace_quota_blocks       most distinct blocks that one namespace may pin
    block_bytes                  bytes of one KV block; metrics and reports give leases in bytes
    min_lease_tokens             a shorter breakpoint is refused as too_short
    lease_grace_ms               how much longer a lease lives than the cache entry it serves
    max_queue                    waiting requests; one more is rejected as "overloaded"
    max_queue_wait_ms            a request that waited this long is rejected as "overloaded"
    max_bypass_ms                how long others pass a request that does not fit, and how long
                                 admission then waits for it before they pass again
    min_shared_tokens            a request is deferred if a running one computes this much of it
    max_defer_ms                 longest deferral
    enable_prefix_caching        off: nothing is reused, every lease is refused
    enable_chunked_prefill       off: a prompt is computed in one step, still cut at breakpoints
    scheduling                   static: a new batch starts when the last one has ended
    kv_layout                    contiguous: a sequence gets the blocks of its prompt and longest
                                 output at admission and keeps them to its end
    """

    block_size: int = 16
    num_blocks: int
    max_model_len: int
    vocab_size: int
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    step_target_ms: int | None = None
    pin_cap_blocks: int
    namespace_quota_blocks: int
    block_bytes: int = 1
    min_lease_tokens: int = 1
    lease_grace_ms: int = 5_000
    max_queue: int = 1_024
    max_queue_wait_ms: int = 60_000
    max_bypass_ms: int = 5_000
    min_shared_tokens: int = 256
    max_defer_ms: int = 30_000
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    scheduling: Scheduling = "continuous"
    kv_layout: KVLayout = "paged"

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    @property
    def max_request_tokens(self) -> int:
        """The longest prompt plus output that fits beside `pin_cap_blocks` pinned blocks."""
        return min(self.max_model_len, (self.num_blocks - self.pin_cap_blocks) * self.block_size)
