"""ModelRunner: executes the scheduler's plans on a loaded model and its KV cache."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from engine.compute.backend import Backend
from engine.compute.kv_cache import KVCache
from engine.compute.sampler import Sampler
from engine.config import EngineConfig
from engine.errors import DeviceLost
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

    def execute(self, plan: Plan) -> list[int | None]:
        """Load and copy blocks, compute all rows as one batch, sample those with `samples`.

        Raises DeviceLost if the device computes nothing any more.
        """
        with _device_errors(), torch.inference_mode():
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

    def snapshot(self, blocks: Sequence[int], num_tokens: int) -> np.ndarray:
        """Return a copy of the first `num_tokens` slots of `blocks`, for a tier to keep.

        Raises DeviceLost as `execute` does.
        """
        with _device_errors(), torch.inference_mode():
            return self._cache.snapshot(blocks, num_tokens)


@contextmanager
def _device_errors() -> Iterator[None]:
    """Raise DeviceLost for errors after which a CUDA context fails whatever it is asked.

    Memory that is not there is none of them: the next step may need less.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error):
            raise DeviceLost(str(error).partition("\n")[0]) from error
        raise
