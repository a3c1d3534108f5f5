"""The paged KV cache: one tensor, block-major, seen layer by layer.

    [num_blocks, layers, 2 (k, v), kv_heads, block_size, head_dim]

A block of all layers is one contiguous run, so copying a block is one copy. Flattened, the cache is
a table of *head blocks* (one head's slots of K or V in one block) or of *slots* (one head's K or V
of one token). The same row numbers serve every layer, counted from that layer's first row.

A block is cleared when it gets its first token or copy, so that nothing of an earlier sequence is
left in it. Attention masks slots that are not written yet, but a masked NaN would still be a NaN.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch

from engine.errors import KVCacheTooLarge
from engine.models.model import ModelShape
from engine.plan import BlockCopy, BlockLoad


def bytes_per_block(shape: ModelShape, dtype: torch.dtype, block_size: int) -> int:
    """Return the bytes that one block takes over all layers."""
    per_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim
    return per_token * block_size * dtype.itemsize


class KVCache:
    """The memory of the KV pool, and the row numbers by which a step reads and writes it.

    Raises KVCacheTooLarge if the memory cannot be allocated.
    """

    def __init__(
        self,
        shape: ModelShape,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = device
        self.num_kv_heads = shape.num_kv_heads
        self.head_dim = shape.head_dim
        layers = shape.num_layers
        self._heads = 2 * self.num_kv_heads  # K heads, then V heads
        dimensions = (num_blocks, layers, self._heads, block_size, self.head_dim)
        self._blocks = _zeros(dimensions, dtype, device)
        slots = self._blocks.view(-1, self.head_dim)
        head_blocks = self._blocks.view(-1, block_size * self.head_dim)
        self._slots = [slots[i * self._heads * block_size :] for i in range(layers)]
        self._head_blocks = [head_blocks[i * self._heads :] for i in range(layers)]
        self._head_blocks_per_block = layers * self._heads

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy the first slots of one block to another and clear the rest, in the order given."""
        for copy in copies:
            source, target = self._blocks[copy.source], self._blocks[copy.target]
            target[:, :, : copy.num_slots] = source[:, :, : copy.num_slots]
            target[:, :, copy.num_slots :] = 0

    def clear(self, blocks: np.ndarray) -> None:
        """Zero whole blocks, `blocks` [n]."""
        self._blocks.index_fill_(0, self._rows(blocks.astype(np.int64)), 0)

    @property
    def address(self) -> int:
        """The address of the cache in memory, for kernels that are not torch's."""
        return self._blocks.data_ptr()

    @property
    def layout(self) -> str:
        """The layout of a block's bytes: its dimensions in order, layers first."""
        return "layers, k and v heads, slots, dim: " + str(tuple(self._blocks.shape[1:]))

    def snapshot(self, blocks: Sequence[int], num_tokens: int) -> np.ndarray:
        """Return the first `num_tokens` slots of the blocks as bytes; the slots after are 0."""
        copied = self._blocks[torch.tensor(blocks, device=self.device)]
        if num_tail := num_tokens % self.block_size:
            # The slots after are the private continuation of the sequence that computed the block.
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
            blocks = torch.tensor(load.blocks, device=self.device)
            self._blocks[blocks] = wanted.to(self.device)

    def slot_rows(self, blocks: np.ndarray, offsets: np.ndarray) -> torch.Tensor:
        """Return rows for `write`: n tokens' slots, every head; `blocks` and `offsets` are [n]."""
        first = blocks.astype(np.int64)[:, None] * self._head_blocks_per_block
        head_block = first + np.arange(self._heads)
        return self._rows(head_block * self.block_size + offsets[:, None])

    def head_block_rows(self, block_tables: np.ndarray) -> torch.Tensor:
        """Return rows for `gather`: the head blocks of [s, m] block tables, head by head."""
        first = block_tables.astype(np.int64)[:, None, :] * self._head_blocks_per_block
        return self._rows(first + np.arange(self._heads)[None, :, None])

    def write(self, layer: int, rows: torch.Tensor, kv: torch.Tensor) -> None:
        """Store `kv` [n, 2 x kv_heads, head_dim] at `rows` from `slot_rows`."""
        self._slots[layer].index_copy_(0, rows, kv.reshape(-1, self.head_dim))

    def gather(self, layer: int, rows: torch.Tensor, num_sequences: int) -> torch.Tensor:
        """Return K and V of block tables as [s, 2, kv_heads, m x block_size, head_dim]."""
        head_blocks = self._head_blocks[layer].index_select(0, rows)
        return head_blocks.view(num_sequences, 2, self.num_kv_heads, -1, self.head_dim)

    def _rows(self, rows: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(rows.reshape(-1)).to(self.device)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeroed memory. On CPU, unlike torch's, its pages are allocated when first written."""
    size_bytes = math.prod(shape) * dtype.itemsize
    try:
        if device.type == "cpu":
            return torch.from_numpy(np.zeros(size_bytes, dtype=np.uint8)).view(dtype).view(shape)
        return torch.zeros(shape, dtype=dtype, device=device)
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise KVCacheTooLarge(size_bytes) from error
