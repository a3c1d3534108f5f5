"""ModelRunner: executes the scheduler's plans on a model and its KV cache."""

from collections.abc import Sequence

import numpy as np
import torch

from engine.compute.kv_cache import KVCache
from engine.compute.native.llama import NativeLlama
from engine.compute.ops_torch import PagedAttention
from engine.compute.sampler import Sampler
from engine.config import EngineConfig
from engine.models.llama import Llama
from engine.plan import Plan, Row


class ModelRunner:
    """The real Runner of `engine.plan`. `entropy` feeds the draws of requests without a seed."""

    def __init__(self, model: Llama | NativeLlama, config: EngineConfig, *, entropy: bytes) -> None:
        self._model = model
        self._sampler = Sampler(entropy)
        self._cache = KVCache(
            model.config,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            dtype=model.dtype,
            device=model.device,
        )

    @torch.inference_mode()
    def execute(self, plan: Plan) -> list[int]:
        """Load and copy blocks, compute all rows as one batch, sample those that ask for it."""
        self._cache.load(plan.loads)
        self._cache.copy(plan.copies)
        if not plan.rows:
            return []
        logits = compute_logits(self._model, self._cache, plan.rows)
        return self._sampler.sample(logits, [row for row in plan.rows if row.samples])

    @property
    def kv_layout(self) -> str:
        """How a block's bytes are laid out; snapshots fit only where it is the same."""
        return self._cache.layout

    @torch.inference_mode()
    def snapshot(self, blocks: Sequence[int], num_tokens: int) -> np.ndarray:
        """Copy the first `num_tokens` slots of `blocks` out of the cache, for a tier to keep."""
        return self._cache.snapshot(blocks, num_tokens)


def compute_logits(model: Llama | NativeLlama, cache: KVCache, rows: Sequence[Row]) -> torch.Tensor:
    """Write the K and V of all rows; return [s, vocab_size] logits of those that sample, in order.

    The logits are those of each sampling row's last position, in float32; the next call may
    overwrite them.
    """
    if isinstance(model, NativeLlama):
        return model.compute(cache, rows)
    tokens = np.concatenate([row.token_ids for row in rows]).astype(np.int64)
    positions = np.concatenate(
        [np.arange(row.start, row.start + len(row.token_ids)) for row in rows]
    )
    lasts = np.cumsum([len(row.token_ids) for row in rows]) - 1
    sampled = lasts[[row.samples for row in rows]]
    return model.forward(
        torch.from_numpy(tokens).to(model.device),
        torch.from_numpy(positions).to(model.device),
        PagedAttention(cache, rows, model.dtype),
        torch.from_numpy(sampled).to(model.device),
    )
