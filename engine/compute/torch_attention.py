"""Paged attention in torch: executes a step's attention plan on the KV cache.

The outputs of a token's parts are merged by their log-sum-exp.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it

from engine.compute.attention_plan import (
    ContextPart,
    DecodeGroup,
    TokenSelection,
    plan_attention,
)
from engine.compute.kv_cache import KVCache
from engine.plan import Row

# The output of an attention call, and the log-sum-exp of its scores in float32.
Attended = tuple[torch.Tensor, torch.Tensor]
# Tokens of the batch on the device: a slice selects a view, indices a copy.
_Selection = slice | torch.Tensor

# On CPU, torch compiles bfloat16 attention for each pair of lengths and keeps it, some 130 KB a
# pair. Lengths are padded to multiples of this, so that there are few.
_LENGTH_UNIT = 16


@dataclass(frozen=True, slots=True)
class _Decode:
    """A decode group on the device.

    `mask` is [s, 1, 1, m x block_size], added to the scores: minus infinity past each context.
    """

    queries: _Selection
    head_blocks: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Context:
    """A context part on the device."""

    queries: _Selection
    head_blocks: torch.Tensor
    num_tokens: int


class PagedAttention:
    """Attention of one step, planned at construction for all layers. Call it once a layer."""

    def __init__(self, cache: KVCache, rows: Sequence[Row], dtype: torch.dtype) -> None:
        self._cache = cache
        plan = plan_attention(rows, cache.block_size)
        # A block that gets its first token is cleared: it may hold another sequence's.
        cache.clear(plan.slot_blocks[plan.slot_offsets == 0])
        self._written = cache.slot_rows(plan.slot_blocks, plan.slot_offsets)
        self._prefills = plan.prefills
        self._decodes = [self._place_decode(group, dtype) for group in plan.decodes]
        self._contexts = [self._place_context(part) for part in plan.contexts]

    def __call__(self, q: torch.Tensor, kv: torch.Tensor, layer: int) -> torch.Tensor:
        """Write `kv` [n, 2 x kv_heads, d] and attend with `q` [n, heads, d] to [n, heads x d]."""
        self._cache.write(layer, self._written, kv)
        # Query heads by the KV head that they share: [n, kv_heads, group, d].
        q = q.view(q.shape[0], self._cache.num_kv_heads, -1, q.shape[-1])
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        log_sum = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        for span in self._prefills:
            out[span], log_sum[span] = _attend_causal(q[span], kv[span])
        for decode in self._decodes:
            keys, values = self._cache.gather(
                layer, decode.head_blocks, decode.mask.shape[0]
            ).unbind(1)
            out[decode.queries], log_sum[decode.queries] = attend(
                q[decode.queries], keys, values, mask=decode.mask
            )
        for context in self._contexts:
            keys, values = self._cache.gather(layer, context.head_blocks, 1).unbind(1)
            queries = context.queries
            found = _attend_all(q[queries], keys, values, num_tokens=context.num_tokens)
            out[queries], log_sum[queries] = _merge((out[queries], log_sum[queries]), found)
        return out.view(q.shape[0], -1)

    def _place_decode(self, group: DecodeGroup, dtype: torch.dtype) -> _Decode:
        num_slots = group.block_tables.shape[1] * self._cache.block_size
        hidden = torch.from_numpy(np.arange(num_slots)[None, :] >= group.num_tokens[:, None])
        mask = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf).to(dtype)
        return _Decode(
            queries=self._place_selection(group.queries),
            head_blocks=self._cache.head_block_rows(group.block_tables),
            mask=mask[:, None, None, :].to(self._cache.device),
        )

    def _place_context(self, part: ContextPart) -> _Context:
        return _Context(
            queries=self._place_selection(part.queries),
            head_blocks=self._cache.head_block_rows(part.block_table[None, :]),
            num_tokens=part.num_tokens,
        )

    def _place_selection(self, selection: TokenSelection) -> _Selection:
        if isinstance(selection, slice):
            return selection
        return torch.from_numpy(selection).to(self._cache.device)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
) -> Attended:
    """Attend with `q` [b, h, n, d] to `k`, `v` [b, h, m, d]; return [b, h, n, d] and [b, h, n]."""
    if q.device.type != "cpu":
        return attend_plainly(q, k, v, mask=mask, is_causal=is_causal)
    # What F.scaled_dot_product_attention runs on CPU; only this form returns the log-sum-exp.
    attended: Attended = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, is_causal, attn_mask=mask
    )
    return attended


def attend_plainly(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
) -> Attended:
    """Attend as `attend` does, on any device, with all scores in memory."""
    scores = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    if mask is not None:
        scores += mask
    if is_causal:
        scores += torch.full(scores.shape[-2:], -torch.inf, device=q.device).triu_(1)
    return scores.softmax(dim=-1).to(q.dtype) @ v, scores.logsumexp(dim=-1)


def _attend_causal(q: torch.Tensor, kv: torch.Tensor) -> Attended:
    """Attend among a sequence's new tokens: `q` [n, kv_heads, group, d], `kv` as in a call."""
    n = q.shape[0]
    # Tokens after the last change nothing for those before.
    q, kv = _padded(q), _padded(kv)
    keys, values = kv.transpose(0, 1).unsqueeze(1).chunk(2)  # [kv_heads, 1, n, d]
    heads = q.permute(1, 2, 0, 3)
    out, log_sum = attend(
        heads, keys.expand(heads.shape), values.expand(heads.shape), is_causal=True
    )
    return out.permute(2, 0, 1, 3)[:n], log_sum.permute(2, 0, 1)[:n]


def _attend_all(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, num_tokens: int) -> Attended:
    """Attend with `q` [n, kv_heads, group, d] to `num_tokens` of `k`, `v` [1, kv_heads, m, d].

    All query heads that share a KV head become the rows of one matrix.
    """
    num_rows, q = q.shape[0], _padded(q)
    mask = None
    if num_tokens < k.shape[2]:
        mask = torch.zeros(1, 1, 1, k.shape[2], dtype=q.dtype, device=q.device)
        mask[..., num_tokens:] = -torch.inf
    n, kv_heads, group, head_dim = q.shape
    folded = q.transpose(0, 1).reshape(1, kv_heads, n * group, head_dim)
    out, log_sum = attend(folded, k, v, mask=mask)
    return (
        out.view(kv_heads, n, group, head_dim).transpose(0, 1)[:num_rows],
        log_sum.reshape(kv_heads, n, group).transpose(0, 1)[:num_rows],
    )


def _padded(tokens: torch.Tensor) -> torch.Tensor:
    """Return `tokens` [n, ...] padded with zeros to a multiple of the length unit."""
    missing = -len(tokens) % _LENGTH_UNIT
    if tokens.device.type != "cpu" or not missing:
        return tokens
    return F.pad(tokens, (*[0, 0] * (tokens.dim() - 1), 0, missing))


def _merge(a: Attended, b: Attended) -> Attended:
    """Return the attention to two parts of a context from the attention to each."""
    (a_out, a_log_sum), (b_out, b_log_sum) = a, b
    b_share = (b_log_sum - a_log_sum).sigmoid_().to(a_out.dtype)
    return a_out.lerp(b_out, b_share.unsqueeze(-1)), a_log_sum.logaddexp(b_log_sum)
