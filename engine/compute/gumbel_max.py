"""Draws from weighted tokens by the Gumbel-max trick, with noise that is a hash.

The largest of log(weight) + noise has exactly the distribution of the weights. The noise depends on
the row's key, the round and the token's id alone: not on the batch, the device or the weights. So
weights that another batch rounds a little differently seldom have another winner.
"""

import torch

_ONES_52 = 2**52 - 1


def draw_place(
    weights: torch.Tensor, group_ids: torch.Tensor, keys: torch.Tensor, round_number: int
) -> torch.Tensor:
    """Draw one place in each row with probabilities in proportion to `weights`.

    weights    [n, g, s] float32, at least 0; the tokens of g groups of s neighbouring ids
    group_ids  [n, g] int64: group i holds the token ids from s x i on
    keys       [n, 1] int64
    returns    [n, 1] int64, an index into the g x s weights of its row

    The best of a group's scores is itself a Gumbel variable around the log of the group's sum. So a
    group is drawn by the sums, then a token in it, with fresh noise: g + s numbers and not g x s.
    """
    size = weights.shape[-1]
    noise = _noise(keys, group_ids, 2 * round_number)
    group = (weights.sum(-1).double().log() + noise).argmax(-1, keepdim=True)
    members = torch.arange(size, device=weights.device)
    first_ids = group_ids.gather(1, group) * size
    noise = _noise(keys, first_ids + members, 2 * round_number + 1)
    inside = weights.gather(1, group.unsqueeze(-1).expand(-1, -1, size)).squeeze(1)
    member = (inside.double().log() + noise).argmax(-1, keepdim=True)
    return group * size + member


def _noise(keys: torch.Tensor, ids: torch.Tensor, stream: int) -> torch.Tensor:
    """Return standard Gumbel variables float64, each a hash of its key, id and stream.

    The hash is SplitMix64 (Steele, Lea and Flood 2014), at the place that stream and id name.
    """
    hashed = keys + (ids + ((stream << 32) + 1)) * -0x61C8864680B583EB  # wraps around, as it should
    hashed = (hashed ^ _shifted(hashed, 30)) * -0x40A7B892E31B1A47
    hashed = (hashed ^ _shifted(hashed, 27)) * -0x6B2FB644ECCEEE15
    hashed = hashed ^ _shifted(hashed, 31)
    # 52 bits and a half step: exact in a double, never 0 and never 1.
    uniform = (_shifted(hashed, 12) & _ONES_52).double().add_(0.5).div_(2**52)
    return uniform.log_().neg_().log_().neg_()


def _shifted(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Shift to the right and fill with zeros; torch fills with the sign."""
    return (bits >> count) & ((1 << (64 - count)) - 1)
