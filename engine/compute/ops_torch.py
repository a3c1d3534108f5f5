"""Paged attention in torch: how one step's rows read and write the KV cache.

A token attends in up to three parts, each a plain attention call without wasted scores:

    |  shared prefix  |  own context  |  own new tokens  |
       one call for       one call        causal, straight from this step's K and V
       all its readers    a sequence

The parts' outputs are merged by their log-sum-exp. Sequences with one new token (decode) take their
own context and new token in one part instead, together with others of similar length: one gather
and one call a group cost a tenth of a call a sequence on CPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it

from engine.compute.kv_cache import KVCache
from engine.plan import Row

# A prefix is read once for all sequences that share it if that saves reading this many tokens;
# below, merging costs more than it saves.
SHARED_TOKENS_MIN = 1_024
# Sequences count as sharing if they agree up to this block at least.
SHARED_BLOCKS_MIN = 8

# Rows of the batch: a slice where they are neighbours (a view), else their numbers (a copy).
_Selection = slice | torch.Tensor
# The output of an attention call, and the log-sum-exp of its scores in float32.
Attended = tuple[torch.Tensor, torch.Tensor]

# On CPU, torch compiles bfloat16 attention for each pair of lengths that it meets and keeps it,
# some 130 KB a pair: lengths are padded to multiples of this, so that there are few.
_LENGTH_UNIT = 16


@dataclass(frozen=True, slots=True)
class _Decode:
    """Sequences with one new token each.

    `mask` is [s, 1, 1, m x block_size], added to the scores: minus infinity past each context.
    """

    rows: _Selection
    tiles: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Context:
    """The first `num_tokens` tokens in `tiles`, which every token of `rows` sees whole."""

    rows: _Selection
    tiles: torch.Tensor
    num_tokens: int


class PagedAttention:
    """Attention of one step. Index work is done at construction, once for all layers.

    Call it once a layer; it writes the step's K and V before it attends.
    """

    def __init__(self, cache: KVCache, rows: Sequence[Row], dtype: torch.dtype) -> None:
        self._cache = cache
        self._dtype = dtype
        self._written = self._prepare_slots(rows)
        ends = np.cumsum([len(row.token_ids) for row in rows]).tolist()
        spans = [slice(end - len(row.token_ids), end) for row, end in zip(rows, ends, strict=True)]
        self._prefills = [span for span in spans if span.stop - span.start > 1]
        self._contexts: list[_Context] = []
        shared_blocks = self._share(rows, spans)
        groups: dict[int, list[int]] = {}
        for i, (row, span) in enumerate(zip(rows, spans, strict=True)):
            own = row.block_table[shared_blocks[i] :]
            own_context = row.start - shared_blocks[i] * cache.block_size
            if len(row.token_ids) == 1:
                groups.setdefault(len(own).bit_length(), []).append(i)
            elif own_context > 0:
                tiles = cache.tile_rows(own[None, : -(-own_context // cache.block_size)])
                self._contexts.append(_Context(span, tiles, own_context))
        self._decodes = [
            self._decode([(rows[i], spans[i], shared_blocks[i]) for i in group])
            for group in groups.values()
        ]

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
            keys, values = self._cache.gather(layer, decode.tiles, decode.mask.shape[0]).unbind(1)
            out[decode.rows], log_sum[decode.rows] = attend(
                q[decode.rows], keys, values, mask=decode.mask
            )
        for context in self._contexts:
            keys, values = self._cache.gather(layer, context.tiles, 1).unbind(1)
            found = _attend_all(
                q[context.rows],
                keys,
                values,
                num_tokens=context.num_tokens,
            )
            rows = context.rows
            out[rows], log_sum[rows] = _merge((out[rows], log_sum[rows]), found)
        return out.view(q.shape[0], -1)

    def _prepare_slots(self, rows: Sequence[Row]) -> torch.Tensor:
        """Cache rows of every token of the batch; blocks that get their first token are cleared."""
        size = self._cache.block_size
        positions = [np.arange(row.start, row.start + len(row.token_ids)) for row in rows]
        offsets = np.concatenate(positions) % size
        blocks = np.concatenate(
            [row.block_table[at // size] for row, at in zip(rows, positions, strict=True)]
        )
        self._cache.clear(blocks[offsets == 0])
        return self._cache.slot_rows(blocks, offsets)

    def _share(self, rows: Sequence[Row], spans: Sequence[slice]) -> list[int]:
        """Make a part of each shared prefix that pays; return the blocks each row has in one."""
        size = self._cache.block_size
        shared_blocks = [0] * len(rows)
        readers: dict[int, list[int]] = {}
        for i, row in enumerate(rows):
            if row.start >= SHARED_BLOCKS_MIN * size:
                readers.setdefault(int(row.block_table[SHARED_BLOCKS_MIN - 1]), []).append(i)
        for group in readers.values():
            written = [rows[i].block_table[: rows[i].start // size] for i in group]
            num_blocks = _common_blocks(written)
            if num_blocks * size * (len(group) - 1) < SHARED_TOKENS_MIN:
                continue
            tiles = self._cache.tile_rows(rows[group[0]].block_table[None, :num_blocks])
            selection = _selection([spans[i] for i in group], self._cache.device)
            self._contexts.append(_Context(selection, tiles, num_blocks * size))
            for i in group:
                shared_blocks[i] = num_blocks
        return shared_blocks

    def _decode(self, group: Sequence[tuple[Row, slice, int]]) -> _Decode:
        size = self._cache.block_size
        own = [row.block_table[shared:] for row, _, shared in group]
        num_blocks = max(len(table) for table in own)
        # Short tables repeat their own last block: masked, and never another sequence's memory.
        tables = np.stack([np.pad(table, (0, num_blocks - len(table)), "edge") for table in own])
        contexts = np.array([row.start + 1 - shared * size for row, _, shared in group])
        hidden = torch.from_numpy(np.arange(num_blocks * size)[None, :] >= contexts[:, None])
        mask = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf).to(self._dtype)
        return _Decode(
            rows=_selection([span for _, span, _ in group], self._cache.device),
            tiles=self._cache.tile_rows(tables),
            mask=mask[:, None, None, :].to(self._cache.device),
        )


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
) -> Attended:
    """Attention of `q` [b, h, n, d] to `k` and `v` [b, h, m, d]: [b, h, n, d] and [b, h, n]."""
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
    """`attend` on any device, with the scores in memory."""
    scores = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    if mask is not None:
        scores += mask
    if is_causal:
        scores += torch.full(scores.shape[-2:], -torch.inf, device=q.device).triu_(1)
    return scores.softmax(dim=-1).to(q.dtype) @ v, scores.logsumexp(dim=-1)


def _attend_causal(q: torch.Tensor, kv: torch.Tensor) -> Attended:
    """New tokens of one sequence among themselves: `q` [n, kv_heads, group, d], `kv` likewise."""
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
    """`q` [n, kv_heads, group, d] to the first `num_tokens` of `k` and `v` [1, kv_heads, m, d].

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
    """`tokens` [n, ...] with zeros after it, up to a multiple of the length unit."""
    missing = -len(tokens) % _LENGTH_UNIT
    if tokens.device.type != "cpu" or not missing:
        return tokens
    return F.pad(tokens, (*[0, 0] * (tokens.dim() - 1), 0, missing))


def _merge(a: Attended, b: Attended) -> Attended:
    """Attention to two parts of a context, from the attention to each."""
    (a_out, a_log_sum), (b_out, b_log_sum) = a, b
    b_share = (b_log_sum - a_log_sum).sigmoid_().to(a_out.dtype)
    return a_out.lerp(b_out, b_share.unsqueeze(-1)), a_log_sum.logaddexp(b_log_sum)


def _selection(spans: Sequence[slice], device: torch.device) -> _Selection:
    rows = np.concatenate([np.arange(span.start, span.stop) for span in spans])
    if rows[-1] - rows[0] == len(rows) - 1:  # ascending, so without a gap
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return torch.from_numpy(rows).to(device)


def _common_blocks(tables: Sequence[np.ndarray]) -> int:
    """How many leading blocks all tables have in common."""
    num_blocks = min(len(table) for table in tables)
    stacked = np.stack([table[:num_blocks] for table in tables])
    agree = (stacked == stacked[0]).all(axis=0)
    return num_blocks if agree.all() else int(agree.argmin())
