"""The plan of one step: what the scheduler asks of the model runner.

`engine.scheduling.scheduler` makes plans, a `Runner` executes them. The real runner is
`engine.compute.model_runner`; tests have runners without a model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from engine.protocol import Sampling


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy the first `num_slots` token slots of block `source` to block `target`, every layer."""

    source: int
    target: int
    num_slots: int


@dataclass(frozen=True, slots=True, eq=False)
class BlockLoad:
    """Fill `blocks` from a stored lease's payload, past the first `skip` blocks in it."""

    blocks: tuple[int, ...]
    payload: Any
    skip: int


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's share of a step.

    token_ids    [n] int32, at positions start .. start + n - 1; their K/V are written
    start        position of token_ids[0]; everything before it is already in the cache
    block_table  [ceil((start + n) / block_size)] int32, the sequence's blocks in order
    samples      whether the last position's logits are sampled (the prompt's end, or a decode)
    output_index how many output tokens the sequence had before this step; with the sampling seed
                 it fixes the random draw, so a preempted request continues unchanged
    """

    request_id: str
    namespace: bytes
    token_ids: np.ndarray
    start: int
    block_table: np.ndarray
    samples: bool
    sampling: Sampling
    output_index: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: first all `loads` and `copies`, then all `rows` as one ragged batch."""

    copies: tuple[BlockCopy, ...]
    rows: tuple[Row, ...]
    loads: tuple[BlockLoad, ...] = ()


class Runner(Protocol):
    """Executes plans against one KV cache."""

    def execute(self, plan: Plan) -> Sequence[int | None]:
        """Write K/V for every row and return the sampled id of each row that samples, in order.

        Returning means that the KV of all rows is written: the scheduler may publish it. None is a
        row whose logits are no numbers: nothing of it is valid. After an error the same rows may be
        executed again, in other plans.

        Raises DeviceLost if the device computes nothing any more.
        """
        ...
