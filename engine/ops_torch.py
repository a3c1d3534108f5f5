"""Paged attention in torch: how one step's rows read and write the KV cache.

Sequences that compute several tokens (prefill) attend one by one. Those that compute one token
(decode) attend together, in groups whose contexts are within a factor of two in blocks: one gather
and one attention call a group cost a tenth of a call a sequence on CPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it

from engine.kv_cache import KVCache
from engine.plan import Row


@dataclass(frozen=True, slots=True)
class _Prefill:
    """One sequence's new tokens, rows first .. last - 1 of the batch, and their context.

    `context` counts tokens, the new ones included. `mask` is [last - first, context], added to the
    scores; None if the new tokens are all, where plain causal attention is twice as fast.
    """

    first: int
    last: int
    context: int
    tiles: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Decode:
    """Sequences with one new token each: `rows` [s] of the batch.

    `mask` is [s, 1, 1, m x block_size], added to the scores: minus infinity past each context.
    """

    rows: torch.Tensor
    tiles: torch.Tensor
    mask: torch.Tensor


class PagedAttention:
    """Attention of one step. Index work is done at construction, once for all layers.

    Call it once a layer; it writes the step's K and V before it attends.
    """

    def __init__(self, cache: KVCache, rows: Sequence[Row], dtype: torch.dtype) -> None:
        self._cache = cache
        self._dtype = dtype
        lengths = [len(row.tokens) for row in rows]
        firsts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        self._written = self._prepare_slots(rows)
        self._prefills = [
            self._prefill(row, int(first))
            for row, first, length in zip(rows, firsts, lengths, strict=True)
            if length > 1
        ]
        groups: dict[int, list[tuple[int, Row]]] = {}
        for row, first, length in zip(rows, firsts, lengths, strict=True):
            if length == 1:
                groups.setdefault(len(row.block_table).bit_length(), []).append((int(first), row))
        self._decodes = [self._decode(group) for group in groups.values()]

    def __call__(self, q: torch.Tensor, kv: torch.Tensor, layer: int) -> torch.Tensor:
        """Write `kv` [n, 2 x kv_heads, d] and attend with `q` [n, heads, d] to [n, heads x d]."""
        self._cache.write(layer, self._written, kv)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for prefill in self._prefills:
            self._attend_prefill(prefill, q, layer, out)
        for decode in self._decodes:
            self._attend_decode(decode, q, layer, out)
        return out.view(q.shape[0], -1)

    def _attend_prefill(
        self, prefill: _Prefill, q: torch.Tensor, layer: int, out: torch.Tensor
    ) -> None:
        keys, values = self._cache.gather(layer, prefill.tiles, 1).unbind(1)
        attended = F.scaled_dot_product_attention(
            q[prefill.first : prefill.last].transpose(0, 1).unsqueeze(0),
            keys[:, :, : prefill.context],
            values[:, :, : prefill.context],
            attn_mask=prefill.mask,
            is_causal=prefill.mask is None,
            enable_gqa=True,
        )
        out[prefill.first : prefill.last] = attended.squeeze(0).transpose(0, 1)

    def _attend_decode(
        self, decode: _Decode, q: torch.Tensor, layer: int, out: torch.Tensor
    ) -> None:
        num_sequences = len(decode.rows)
        keys, values = self._cache.gather(layer, decode.tiles, num_sequences).unbind(1)
        # The query heads that share one KV head become the rows of one small matrix.
        grouped = q[decode.rows].view(num_sequences, self._cache.num_kv_heads, -1, q.shape[-1])
        attended = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=decode.mask)
        out[decode.rows] = attended.reshape(num_sequences, *q.shape[1:])

    def _prepare_slots(self, rows: Sequence[Row]) -> torch.Tensor:
        """Cache rows of every token of the batch; blocks that get their first token are cleared."""
        size = self._cache.block_size
        positions = [np.arange(row.start, row.start + len(row.tokens)) for row in rows]
        offsets = np.concatenate(positions) % size
        blocks = np.concatenate(
            [row.block_table[at // size] for row, at in zip(rows, positions, strict=True)]
        )
        self._cache.clear(blocks[offsets == 0])
        return self._cache.slot_rows(blocks, offsets)

    def _prefill(self, row: Row, first: int) -> _Prefill:
        length = len(row.tokens)
        context = row.start + length
        mask = None
        if row.start > 0:
            mask = torch.full((length, context), -torch.inf).triu_(row.start + 1).to(self._dtype)
        tiles = self._cache.tile_rows(row.block_table[None, :])
        return _Prefill(first, first + length, context, tiles, mask)

    def _decode(self, group: list[tuple[int, Row]]) -> _Decode:
        rows = [row for _, row in group]
        contexts = np.array([row.start + 1 for row in rows])
        num_blocks = max(len(row.block_table) for row in rows)
        # Short tables repeat their own last block: masked, and never another sequence's memory.
        tables = np.stack(
            [
                np.pad(row.block_table, (0, num_blocks - len(row.block_table)), "edge")
                for row in rows
            ]
        )
        slots = np.arange(num_blocks * self._cache.block_size)
        hidden = torch.from_numpy(slots[None, :] >= contexts[:, None])
        mask = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf).to(self._dtype)
        return _Decode(
            rows=torch.tensor([first for first, _ in group]),
            tiles=self._cache.tile_rows(tables),
            mask=mask[:, None, None, :],
        )
