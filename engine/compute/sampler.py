"""Samples output tokens: greedy, temperature, top-k, top-p; seeded and without state.

The draw of a token depends only on its logits, the request's seed and the token's index. So a
request draws the same tokens when it is preempted, batched differently or repeated.
"""

import hashlib
from collections.abc import Callable, Sequence

import torch

from engine.compute.candidates import Candidates, likeliest_of_top_k, whole_rows
from engine.plan import Row

GROUP_SIZE = 64  # tokens with neighbouring ids; near the square root of a vocabulary is best
NARROW_TOP_K = 64  # up to here the groups that can have the top_k are fewer than all by far
LOGITS_AT_ONCE = 1 << 20  # on a CPU: what is made of them stays in its cache


class Sampler:
    """Samples the rows of one step.

    `entropy` is a secret of this process. A request without a seed gets one derived from it and the
    request's id: unpredictable, and the same after preemption.
    """

    def __init__(self, entropy: bytes) -> None:
        self._entropy = entropy

    def sample(self, logits: torch.Tensor, rows: Sequence[Row]) -> list[int | None]:
        """Return a token id for each row of `logits` [s, vocab_size] float32.

        None for a row whose largest logit is NaN or infinite: none of its tokens means anything.
        """
        if not rows:
            return []
        likeliest, largest = _likeliest(logits)
        chosen = [
            token if finite else None
            for token, finite in zip(likeliest, largest.isfinite().flatten().tolist(), strict=True)
        ]
        num_at_once = max(1, LOGITS_AT_ONCE // logits.shape[-1]) if logits.is_cpu else len(rows)
        for candidates, indices in _kinds(rows, chosen, num_groups=logits.shape[-1] // GROUP_SIZE):
            for first in range(0, len(indices), num_at_once):
                part = indices[first : first + num_at_once]
                keys = torch.tensor([[self._key(rows[i])] for i in part], device=logits.device)
                # A slice is no copy; mostly all rows sample in one way.
                place = slice(part[0], part[-1] + 1) if part[-1] - part[0] < len(part) else part
                sampling = [rows[i].sampling for i in part]
                tokens = candidates(_grouped(logits[place]), largest[place], keys, sampling).draw()
                for i, token in zip(part, tokens.flatten().tolist(), strict=True):
                    chosen[i] = token
        return chosen

    def _key(self, row: Row) -> int:
        """Return 64 signed bits that depend on the row's seed and output index only."""
        seed = row.sampling.seed
        key = (
            hashlib.blake2b(row.request_id.encode(), key=self._entropy).digest()
            if seed is None
            else b"seed:%d" % seed
        )
        digest = hashlib.blake2b(b"%d" % row.output_index, key=key[:64], digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)


def _likeliest(logits: torch.Tensor) -> tuple[list[int], torch.Tensor]:
    """Return each row's first largest logit: its token id, and the number [s, 1].

    A NaN counts as the largest.
    """
    if logits.is_cpu:  # NumPy's argmax is seven times as fast there as torch's
        tokens = torch.from_numpy(logits.numpy().argmax(-1)).unsqueeze(-1)
    else:
        tokens = logits.argmax(-1, keepdim=True)
    ids: list[int] = tokens.flatten().tolist()
    return ids, logits.gather(1, tokens)


def _kinds(
    rows: Sequence[Row], chosen: Sequence[int | None], *, num_groups: int
) -> list[tuple[Callable[..., Candidates], list[int]]]:
    """Return each kind of candidates with the rows that it suits; greedy rows have their token."""
    whole: list[int] = []
    top_k: list[int] = []
    for i, row in enumerate(rows):
        sampling = row.sampling
        if chosen[i] is None or sampling.temperature == 0 or sampling.top_k == 1:
            continue
        is_narrow = 0 < sampling.top_k <= min(NARROW_TOP_K, num_groups)
        (top_k if is_narrow else whole).append(i)
    return [(whole_rows, whole), (likeliest_of_top_k, top_k)]


def _grouped(logits: torch.Tensor) -> torch.Tensor:
    """Return `logits` [n, v] in groups [n, g, s], the last one filled up with -inf."""
    if rest := logits.shape[-1] % GROUP_SIZE:
        logits = torch.nn.functional.pad(logits, (0, GROUP_SIZE - rest), value=-torch.inf)
    return logits.reshape(len(logits), -1, GROUP_SIZE)
