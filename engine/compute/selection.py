"""Finds the largest logits of each row without sorting the vocabulary.

Logits stand in groups of neighbouring token ids. Of the numbers above the k-th largest there are at
most k - 1, so at most k - 1 groups have one: the k groups with the largest maxima hold all of them.
"""

from collections.abc import Sequence

import torch


def likeliest_groups(groups: torch.Tensor, count: int) -> torch.Tensor:
    """Return the `count` groups [n, count] int64 with the largest maxima, in no certain order.

    groups  [n, g, s] float32 without NaN, g at least `count`
    """
    return groups.amax(-1).topk(count, dim=-1).indices


def kth_largest(values: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Return the `counts[i]`-th largest number of row i of `values` [n, v], as [n, 1]."""
    descending = values.topk(max(counts), dim=-1).values
    ranks = torch.tensor([[count - 1] for count in counts], device=values.device)
    return descending.gather(1, ranks)


def kth_largest_of_many(groups: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Return a number [n, 1] that as many numbers of row i reach as its `counts[i]`-th largest.

    groups   [n, g, s] float32 without NaN; `counts` may be anything from 1 to g x s

    For counts so large that sorting would cost more: it halves an interval of bit patterns, and
    counts at most 32 times.
    """
    size, maxima = groups.shape[-1], groups.amax(-1)
    wanted = torch.tensor([[count] for count in counts], device=groups.device)
    # Above the j-th largest maximum there are at most (j - 1) x s numbers.
    ceiling = maxima.sort(-1, descending=True).values.gather(1, (wanted - 1) // size)
    high = _ordered_bits(ceiling) + 1
    low = _ordered_bits(groups.amin((1, 2)).unsqueeze(-1))
    reaching = torch.empty_like(groups)
    while bool((high - low > 1).any()):  # enough numbers reach `low`, too few reach `high`
        middle = (low + high) >> 1
        torch.ge(groups, _from_ordered_bits(middle).unsqueeze(-1), out=reaching)
        num_reaching = reaching.sum((1, 2)).unsqueeze(-1)
        low = torch.where(num_reaching >= wanted, middle, low)
        high = torch.where(num_reaching >= wanted, high, middle)
        high = torch.where(num_reaching == wanted, low + 1, high)
    return _from_ordered_bits(low)


def _ordered_bits(values: torch.Tensor) -> torch.Tensor:
    """Return int64 in the order of float32 `values`."""
    # Floats are ordered like their bits read as integers, once those of negative ones are inverted.
    bits = values.contiguous().view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()


def _from_ordered_bits(ordered: torch.Tensor) -> torch.Tensor:
    bits = ordered.int()
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).view(torch.float32)
