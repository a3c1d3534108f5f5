"""The tokens that rows may draw, and the draw: exact top-k and top-p without a sort."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.compute.gumbel_max import draw_place
from engine.compute.selection import kth_largest, kth_largest_of_many, likeliest_groups
from engine.protocol import Sampling

# Any lower temperature acts like this one; above zero, so that 0 / temperature is 0.
TEMPERATURE_MIN = 1e-30


@dataclass(frozen=True, slots=True)
class Candidates:
    """The tokens of some rows, in groups of s tokens with neighbouring ids.

    values     [n, g, s] float32 logits
    weights    [n, g, s] float32, exp of the scaled logits: 1 for the likeliest, 0 for none
    group_ids  [n, g] int64: group i has the token ids from i x s on
    largest    [n, 1], the largest logit of each row, finite
    keys       [n, 1] int64, what a row's noise is made from
    limits     [n, 1] float32: a token stays if those above it weigh less; infinite keeps all
    """

    values: torch.Tensor
    weights: torch.Tensor
    group_ids: torch.Tensor
    largest: torch.Tensor
    keys: torch.Tensor
    limits: torch.Tensor

    def draw(self) -> torch.Tensor:
        """Draw a token id for each row, [n, 1], from the fewest likeliest that reach its limit.

        A token is drawn first and then looked at. If it does not stay, the row draws again from
        those above it: what stays is among them, and each of it as likely as before. Equally likely
        tokens stay or go together.
        """
        size = self.values.shape[-1]
        chosen = torch.empty_like(self.keys)
        rows, these, round_number = torch.arange(len(chosen), device=chosen.device), self, 0
        while len(rows) > 0:
            place = draw_place(these.weights, these.group_ids, these.keys, round_number)
            chosen[rows] = these.group_ids.gather(1, place // size) * size + place % size
            if bool(these.limits.isinf().all()):
                break
            drawn = these.values.flatten(1).gather(1, place)
            above = _as_weights(torch.gt, these.values, drawn)
            mass = torch.linalg.vecdot(these.weights.flatten(1), above.flatten(1)).unsqueeze(-1)
            goes = (mass >= these.limits) & (drawn < these.largest)
            again = goes.squeeze(-1).nonzero().squeeze(-1)
            rows, these, round_number = rows[again], these.of(again), round_number + 1
            these.weights.mul_(above[again])
        return chosen

    def of(self, rows: torch.Tensor) -> "Candidates":
        """Return a copy of some `rows` [m] int64."""
        return Candidates(
            self.values[rows],
            self.weights[rows],
            self.group_ids[rows],
            self.largest[rows],
            self.keys[rows],
            self.limits[rows],
        )


def whole_rows(
    values: torch.Tensor, largest: torch.Tensor, keys: torch.Tensor, sampling: Sequence[Sampling]
) -> Candidates:
    """Return all tokens, without those that top_k takes out, as candidates."""
    weights = _weights(values, largest, sampling)
    limited = [i for i, s in enumerate(sampling) if 0 < s.top_k < values[0].numel()]
    if limited:
        floors = largest.new_full((len(sampling), 1), -torch.inf)
        counts = [sampling[i].top_k for i in limited]
        floors[limited] = kth_largest_of_many(values[limited], counts)
        weights.mul_(_as_weights(torch.ge, values, floors))
    group_ids = torch.arange(values.shape[1], device=values.device).expand(len(sampling), -1)
    limits = _limits(weights, sampling)
    return Candidates(values, weights, group_ids, largest, keys, limits)


def likeliest_of_top_k(
    values: torch.Tensor, largest: torch.Tensor, keys: torch.Tensor, sampling: Sequence[Sampling]
) -> Candidates:
    """Return the top_k tokens of each row, looking only at the groups that can have them."""
    counts = [s.top_k for s in sampling]
    group_ids = likeliest_groups(values, max(counts))
    values = values.gather(1, group_ids.unsqueeze(-1).expand(-1, -1, values.shape[-1]))
    floors = kth_largest(values.flatten(1), counts)
    weights = _weights(values, largest, sampling)
    weights.mul_(_as_weights(torch.ge, values, floors))
    return Candidates(values, weights, group_ids, largest, keys, _limits(weights, sampling))


def _weights(
    values: torch.Tensor, largest: torch.Tensor, sampling: Sequence[Sampling]
) -> torch.Tensor:
    temperatures = torch.tensor([[[s.temperature]] for s in sampling], dtype=torch.float64)
    scale = temperatures.clamp_(min=TEMPERATURE_MIN).reciprocal_().float().to(values.device)
    # From the largest down, so that no temperature, however small, makes it infinite. On a CPU exp2
    # takes a third of exp's time.
    return (values - largest.unsqueeze(-1)).mul_(scale * math.log2(math.e)).exp2_()


def _as_weights(
    comparison: Callable[..., torch.Tensor], values: torch.Tensor, bounds: torch.Tensor
) -> torch.Tensor:
    """Return 1.0 where a value [n, g, s] compares so with its row's bound [n, 1], else 0.0."""
    # Made as floats, since to multiply by booleans takes ten times as long on a CPU.
    return comparison(values, bounds.unsqueeze(-1), out=torch.empty_like(values))


def _limits(weights: torch.Tensor, sampling: Sequence[Sampling]) -> torch.Tensor:
    shares = torch.tensor([[s.top_p if s.top_p < 1 else torch.inf] for s in sampling])
    return weights.sum((1, 2)).unsqueeze(-1) * shares.to(weights.device)
