"""Builders of plan rows for tests."""

from collections.abc import Sequence

import numpy as np

from engine.plan import Row
from engine.protocol import Sampling

GREEDY = Sampling(temperature=0.0)


def row(
    tokens: Sequence[int],
    *,
    start: int = 0,
    blocks: Sequence[int] = (0,),
    samples: bool = True,
    sampling: Sampling = GREEDY,
    output_index: int = 0,
    request_id: str = "req_a",
) -> Row:
    """A row of `tokens` at `start`; the block table is cut to what the row needs."""
    needed = -(-(start + len(tokens)) // 16)
    assert len(blocks) >= needed, "the test gave too few blocks"
    return Row(
        request_id=request_id,
        namespace=b"n",
        token_ids=np.array(tokens, dtype=np.int32),
        start=start,
        block_table=np.array(blocks[:needed], dtype=np.int32),
        samples=samples,
        sampling=sampling,
        output_index=output_index,
    )
