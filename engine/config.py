"""EngineConfig: every choice an operator makes for one engine."""

from dataclasses import dataclass
from typing import Literal

Scheduling = Literal["continuous", "static"]
KVLayout = Literal["paged", "contiguous"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One engine's limits. Sizes in tokens or blocks; lengths of time in milliseconds.

    block_size                   tokens a KV block; also the unit of the prefix index
    num_blocks                   blocks in the KV pool
    max_model_len                longest prompt plus output the model accepts
    max_num_seqs                 sequences running at once
    max_num_batched_tokens       token budget of one step
    pin_cap_blocks               most distinct blocks that leases may pin; a served engine's leaves
                                 room for one whole context (engine.compute.memory)
    namespace_quota_blocks       most distinct blocks that one namespace may pin
    block_bytes                  bytes of KV a block, in which operators and reports count leases
    min_lease_tokens             shorter breakpoints are refused as too_short
    lease_grace_ms               how much longer a lease lives than the entry it serves
    max_queue                    waiting requests; one more is answered "overloaded"
    max_queue_wait_ms            a request that waited this long is answered "overloaded"
    min_shared_tokens            a request waits for a running one that computes this much of it
    max_defer_ms                 but never longer than this
    enable_prefix_caching        off: nothing is reused, every lease is refused
    enable_chunked_prefill       off: a prompt is computed in one step (still cut at breakpoints)
    scheduling                   static: a batch is filled when the last one has run dry
    kv_layout                    contiguous: a sequence takes the blocks of its whole prompt and
                                 output at admission and keeps them to its end
    """

    block_size: int = 16
    num_blocks: int
    max_model_len: int
    vocab_size: int
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    pin_cap_blocks: int
    namespace_quota_blocks: int
    block_bytes: int = 1
    min_lease_tokens: int = 1
    lease_grace_ms: int = 5_000
    max_queue: int = 1_024
    max_queue_wait_ms: int = 60_000
    min_shared_tokens: int = 256
    max_defer_ms: int = 30_000
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    scheduling: Scheduling = "continuous"
    kv_layout: KVLayout = "paged"

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    @property
    def max_request_tokens(self) -> int:
        """Longest prompt plus output that can finish with every pinned block in place."""
        return min(self.max_model_len, (self.num_blocks - self.pin_cap_blocks) * self.block_size)
