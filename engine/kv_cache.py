"""The paged KV cache: one tensor, block-major, seen layer by layer.

    [num_blocks, layers, 2 (k, v), kv_heads, block_size, head_dim]

A block of all layers is one contiguous run, so copying a block is one copy. Flattened, the cache is
a table of *tiles* (one head's 16 slots of K or V) or of *slots* (one head's K or V of one token);
the same row numbers serve every layer, counted from that layer's first row.
"""

from collections.abc import Sequence

import numpy as np
import torch

from engine.models.llama_config import LlamaConfig
from engine.plan import BlockCopy, BlockLoad


def bytes_per_block(config: LlamaConfig, dtype: torch.dtype, block_size: int) -> int:
    """Bytes that one block takes over all layers."""
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return per_token * block_size * dtype.itemsize


class KVCache:
    """The pool's memory. It starts as zeros: a slot that was never written is finite."""

    def __init__(
        self,
        config: LlamaConfig,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        layers = config.num_hidden_layers
        self._heads = 2 * self.num_kv_heads  # K heads, then V heads
        self._blocks = torch.zeros(
            (num_blocks, layers, self._heads, block_size, self.head_dim), dtype=dtype, device=device
        )
        slots = self._blocks.view(-1, self.head_dim)
        tiles = self._blocks.view(-1, block_size * self.head_dim)
        self._slots = [slots[i * self._heads * block_size :] for i in range(layers)]
        self._tiles = [tiles[i * self._heads :] for i in range(layers)]
        self._tiles_per_block = layers * self._heads

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy the first slots of one block to another, in the order given."""
        for copy in copies:
            target = self._blocks[copy.target, :, :, : copy.num_slots]
            target.copy_(self._blocks[copy.source, :, :, : copy.num_slots])

    @property
    def layout(self) -> str:
        """What a block's bytes mean: its dimensions in order, layers first."""
        return "layers, k and v heads, slots, dim: " + str(tuple(self._blocks.shape[1:]))

    def snapshot(self, blocks: Sequence[int], num_tokens: int) -> np.ndarray:
        """The blocks' first `num_tokens` slots as bytes, block by block; the slots after are 0."""
        copied = self._blocks[torch.tensor(blocks, device=self._blocks.device)]
        if num_tail := num_tokens % self.block_size:
            # What follows in the last block is the private continuation of whoever computed it.
            copied[-1, :, :, num_tail:] = 0
        if copied.is_cuda:  # page-locked, so that the way back is one fast copy
            copied = torch.empty(copied.shape, dtype=copied.dtype, pin_memory=True).copy_(copied)
        data: np.ndarray = copied.view(torch.uint8).view(-1).numpy()
        return data

    def load(self, loads: Sequence[BlockLoad]) -> None:
        """Fill blocks from snapshots."""
        for load in loads:
            stored = torch.from_numpy(load.payload).view(self._blocks.dtype)
            stored = stored.view(-1, *self._blocks.shape[1:])
            wanted = stored[load.skip : load.skip + len(load.blocks)]
            blocks = torch.tensor(load.blocks, device=self._blocks.device)
            self._blocks[blocks] = wanted.to(self._blocks.device)

    def slot_rows(self, blocks: np.ndarray, offsets: np.ndarray) -> torch.Tensor:
        """Rows for `write`: the slots of n tokens, every head; `blocks` and `offsets` are [n]."""
        tile = blocks.astype(np.int64)[:, None] * self._tiles_per_block + np.arange(self._heads)
        return self._rows(tile * self.block_size + offsets[:, None])

    def tile_rows(self, block_tables: np.ndarray) -> torch.Tensor:
        """Rows for `gather`: the tiles of [s, m] block tables, head by head."""
        first = block_tables.astype(np.int64)[:, None, :] * self._tiles_per_block
        return self._rows(first + np.arange(self._heads)[None, :, None])

    def write(self, layer: int, rows: torch.Tensor, kv: torch.Tensor) -> None:
        """Store `kv` [n, 2 x kv_heads, head_dim] at the rows that `slot_rows` gave."""
        self._slots[layer].index_copy_(0, rows, kv.reshape(-1, self.head_dim))

    def gather(self, layer: int, rows: torch.Tensor, num_sequences: int) -> torch.Tensor:
        """The K and V of block tables as [s, 2, kv_heads, m x block_size, head_dim]."""
        tiles = self._tiles[layer].index_select(0, rows)
        return tiles.view(num_sequences, 2, self.num_kv_heads, -1, self.head_dim)

    def _rows(self, rows: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(rows.reshape(-1)).to(self._blocks.device)
