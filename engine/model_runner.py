"""ModelRunner: executes the scheduler's plans on a model and its KV cache."""

import numpy as np
import torch

from engine.config import EngineConfig
from engine.kv_cache import KVCache
from engine.models.llama import Llama
from engine.ops_torch import PagedAttention
from engine.plan import Plan
from engine.sampler import Sampler


class ModelRunner:
    """The real Runner of `engine.plan`. `entropy` feeds the draws of requests without a seed."""

    def __init__(self, model: Llama, config: EngineConfig, *, entropy: bytes) -> None:
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
        """Copy blocks, compute all rows as one batch, sample those that ask for it."""
        self._cache.copy(plan.copies)
        if not plan.rows:
            return []
        sampling = [row for row in plan.rows if row.samples]
        logits = self._logits(plan)
        return self._sampler.sample(logits, sampling) if sampling else []

    def _logits(self, plan: Plan) -> torch.Tensor:
        """Logits [s, vocab_size] at the last position of every row that samples."""
        rows = plan.rows
        tokens = np.concatenate([row.tokens for row in rows]).astype(np.int64)
        positions = np.concatenate(
            [np.arange(row.start, row.start + len(row.tokens)) for row in rows]
        )
        ends = np.cumsum([len(row.tokens) for row in rows])
        sampled = np.array(
            [end - 1 for end, row in zip(ends, rows, strict=True) if row.samples], dtype=np.int64
        )
        device = self._model.device
        return self._model.forward(
            torch.from_numpy(tokens).to(device),
            torch.from_numpy(positions).to(device),
            PagedAttention(self._cache, rows, self._model.dtype),
            torch.from_numpy(sampled).to(device),
        )
