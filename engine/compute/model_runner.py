"""ModelRunner: executes the scheduler's plans on a loaded model and its KV cache."""

from collections.abc import Sequence

import numpy as np
import torch

from engine.compute.backend import Backend
from engine.compute.kv_cache import KVCache
from engine.compute.sampler import Sampler
from engine.config import EngineConfig
from engine.plan import Plan


class ModelRunner:
    """The engine's Runner. `entropy` seeds the draws of requests without a seed."""

    def __init__(self, backend: Backend, config: EngineConfig, *, entropy: bytes) -> None:
        self._backend = backend
        self._sampler = Sampler(entropy)
        self._cache = KVCache(
            backend.shape,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            dtype=backend.dtype,
            device=backend.device,
        )

    @torch.inference_mode()
    def execute(self, plan: Plan) -> list[int | None]:
        """Load and copy blocks, compute all rows as one batch, sample those with `samples`."""
        self._cache.load(plan.loads)
        self._cache.copy(plan.copies)
        if not plan.rows:
            return []
        logits = self._backend.compute(self._cache, plan.rows)
        return self._sampler.sample(logits, [row for row in plan.rows if row.samples])

    @property
    def kv_layout(self) -> str:
        """The layout of a block's bytes; a snapshot can be loaded only where it is the same."""
        return self._cache.layout

    @torch.inference_mode()
    def snapshot(self, blocks: Sequence[int], num_tokens: int) -> np.ndarray:
        """Return a copy of the first `num_tokens` slots of `blocks`, for a tier to keep."""
        return self._cache.snapshot(blocks, num_tokens)
