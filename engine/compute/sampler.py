"""Samples output tokens: greedy, temperature, top-k, top-p; seeded and without state.

The draw of a token depends only on its logits, the request's seed and the token's index. So a
request draws the same tokens when it is preempted, batched differently or repeated.
"""

import hashlib
from collections.abc import Sequence

import torch

from engine.plan import Row


class Sampler:
    """Samples the rows of one step.

    `entropy` is a secret of this process. A request without a seed gets one derived from it and the
    request's id: unpredictable, and the same after preemption.
    """

    def __init__(self, entropy: bytes) -> None:
        self._entropy = entropy

    def sample(self, logits: torch.Tensor, rows: Sequence[Row]) -> list[int]:
        """Return a token id for each row of `logits` [s, vocab_size] float32."""
        if not rows:
            return []
        chosen = _likeliest(logits)
        drawn = [i for i, row in enumerate(rows) if row.sampling.temperature > 0]
        filtered = [i for i in drawn if rows[i].sampling.top_k > 0 or rows[i].sampling.top_p < 1]
        plain = [i for i in drawn if i not in set(filtered)]
        for indices, draw in ((plain, _draw), (filtered, _draw_filtered)):
            if indices:
                group = [rows[i] for i in indices]
                scaled = logits[indices].double()
                # From the best down, so that no temperature, however small, makes it infinite.
                scaled -= scaled.amax(dim=-1, keepdim=True)
                scaled /= _column([row.sampling.temperature for row in group], logits)
                uniform = _column([self._uniform(row) for row in group], logits)
                for i, token in zip(indices, draw(scaled, uniform, group), strict=True):
                    chosen[i] = token
        return chosen

    def _uniform(self, row: Row) -> float:
        """Return a number in (0, 1) that depends on the row's seed and output index only."""
        seed = row.sampling.seed
        key = (
            hashlib.blake2b(row.request_id.encode(), key=self._entropy).digest()
            if seed is None
            else b"seed:%d" % seed
        )
        digest = hashlib.blake2b(b"%d" % row.output_index, key=key[:64], digest_size=8).digest()
        # 52 bits and a half step: exact in a double, never 0 and never 1.
        return ((int.from_bytes(digest, "little") >> 12) + 0.5) / 2**52


def _likeliest(logits: torch.Tensor) -> list[int]:
    """Return the greedy choices; of equal logits, the first."""
    # NumPy's argmax is seven times as fast as torch's on a CPU: 4 ms a step of 64 sequences.
    array = logits.numpy() if logits.device.type == "cpu" else logits
    tokens: list[int] = array.argmax(-1).tolist()
    return tokens


def _draw(scaled: torch.Tensor, uniform: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    """Invert the cumulative distribution at `uniform`."""
    ceiling = scaled.shape[-1] - 1
    cumulative = scaled.softmax(dim=-1).cumsum(dim=-1)
    drawn = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    tokens: list[int] = drawn.clamp_(max=ceiling).squeeze(-1).tolist()
    return tokens


def _draw_filtered(scaled: torch.Tensor, uniform: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    """Draw among the fewest of the `top_k` likeliest tokens that reach `top_p`."""
    values, order = scaled.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(values.shape[-1], device=values.device)
    limits = [row.sampling.top_k or values.shape[-1] for row in rows]
    values.masked_fill_(ranks >= _column(limits, values), -torch.inf)
    probabilities = values.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    beyond = before >= _column([row.sampling.top_p for row in rows], values)
    beyond[:, 0] = False  # the likeliest token always stays
    values.masked_fill_(beyond, -torch.inf)
    ranks_drawn = _draw(values, uniform, rows)
    return [int(order[i, rank]) for i, rank in enumerate(ranks_drawn)]


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device).unsqueeze(-1)
