"""The KV cache: sizes, and copies between blocks."""

import numpy as np
import pytest
import torch

from engine.compute.kv_cache import KVCache, bytes_per_block
from engine.errors import KVCacheTooLarge
from engine.models.model import ModelShape
from engine.plan import BlockCopy

SHAPE = ModelShape(vocab_size=100, max_model_len=64, num_layers=3, num_kv_heads=2, head_dim=8)
CPU = torch.device("cpu")


@pytest.fixture
def cache() -> KVCache:
    """Five blocks whose slots hold their own block's number."""
    cache = KVCache(SHAPE, num_blocks=5, block_size=16, dtype=torch.float32, device=CPU)
    for layer in range(3):
        for block in range(5):
            rows = cache.slot_rows(np.full(16, block), np.arange(16))
            cache.write(layer, rows, torch.full((16, 4, 8), float(block)))
    return cache


def contents(cache: KVCache, block: int, layer: int) -> torch.Tensor:
    """[2, kv_heads, 16, head_dim] of one block."""
    return cache.gather(layer, cache.head_block_rows(np.array([[block]])), 1)[0]


def test_a_block_takes_the_bytes_of_its_kv_over_all_layers() -> None:
    assert bytes_per_block(SHAPE, torch.float32, 16) == 2 * 3 * 2 * 16 * 8 * 4
    assert bytes_per_block(SHAPE, torch.bfloat16, 16) == 2 * 3 * 2 * 16 * 8 * 2


def test_a_pool_beyond_memory_is_refused_in_one_sentence() -> None:
    with pytest.raises(KVCacheTooLarge, match="name a smaller --kv-cache-memory"):
        KVCache(SHAPE, num_blocks=2**40, block_size=16, dtype=torch.float32, device=CPU)


def test_a_copy_moves_the_first_slots_of_every_layer_and_clears_the_rest(cache: KVCache) -> None:
    cache.copy([BlockCopy(source=1, target=3, num_slots=5)])

    for layer in range(3):
        assert (contents(cache, 3, layer)[:, :, :5] == 1).all()
        assert (contents(cache, 3, layer)[:, :, 5:] == 0).all()
        for untouched in (0, 1, 2, 4):
            assert (contents(cache, untouched, layer) == untouched).all()


def test_clearing_touches_the_named_blocks_alone(cache: KVCache) -> None:
    cache.clear(np.array([1, 4], dtype=np.int32))

    for layer in range(3):
        for block, value in enumerate([0, 0, 2, 3, 0]):
            assert (contents(cache, block, layer) == value).all()


def test_copies_run_in_the_order_given(cache: KVCache) -> None:
    cache.copy([BlockCopy(source=1, target=2, num_slots=16), BlockCopy(2, 4, 16)])

    assert (contents(cache, 4, 0) == 1).all()


def test_keys_and_values_of_each_head_come_back_where_they_were_written(cache: KVCache) -> None:
    kv = torch.arange(2 * 4 * 8, dtype=torch.float32).view(2, 4, 8)  # two tokens
    cache.write(1, cache.slot_rows(np.array([4, 0]), np.array([15, 0])), kv)

    found = cache.gather(1, cache.head_block_rows(np.array([[4, 0]])), 1)  # slots 15 and 16

    assert found.shape == (1, 2, 2, 32, 8)
    torch.testing.assert_close(found[0, :, :, 15], kv[0].view(2, 2, 8))
    torch.testing.assert_close(found[0, :, :, 16], kv[1].view(2, 2, 8))
