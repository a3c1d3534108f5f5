import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.blocks.pool import BlockPool
from engine.blocks.prefix_index import TOKEN_DTYPE, PrefixChain, PrefixIndex


def make_pool(num_blocks: int) -> tuple[BlockPool, PrefixIndex]:
    index = PrefixIndex(4)
    return BlockPool(num_blocks, index), index


def publish(index: PrefixIndex, blocks: list[int], first_token: int = 0) -> PrefixChain:
    tokens = np.arange(first_token, first_token + 4 * len(blocks), dtype=TOKEN_DTYPE)
    chain = PrefixChain(b"tenant", tokens, 4)
    for number, block in enumerate(blocks, 1):
        index.publish(chain, 4 * number, block)
    return chain


def test_a_table_is_evicted_from_its_tail() -> None:
    pool, index = make_pool(3)
    table = [pool.allocate() for _ in range(3)]
    publish(index, table)

    pool.release(table)

    assert [pool.allocate() for _ in range(3)] == table[::-1]


def test_a_block_without_an_entry_is_reused_before_any_cached_one() -> None:
    pool, index = make_pool(3)
    table = [pool.allocate() for _ in range(3)]
    publish(index, table[:2])

    pool.release(table)

    assert pool.allocate() == table[2]


def test_a_copy_of_a_cached_block_is_reused_before_the_block_that_serves() -> None:
    pool, index = make_pool(2)
    first, second = pool.allocate(), pool.allocate()
    publish(index, [first])
    publish(index, [second])

    pool.release([second])
    pool.release([first])

    assert pool.free_blocks() == [second, first]


def test_the_blocks_of_an_expired_lease_are_the_next_to_be_evicted() -> None:
    pool, index = make_pool(4)
    leased, recent = [pool.allocate(), pool.allocate()], [pool.allocate(), pool.allocate()]
    publish(index, leased)
    publish(index, recent, first_token=100)
    for block in leased:
        pool.pin(block)
    pool.release(leased)
    pool.release(recent)

    for block in leased:
        pool.unpin(block, cold=True)

    assert pool.free_blocks() == [*leased[::-1], *recent[::-1]]


def test_empty_blocks_are_used_before_those_of_an_ended_lease() -> None:
    pool, index = make_pool(3)
    leased = pool.allocate()
    publish(index, [leased])
    pool.pin(leased)
    pool.release([leased])

    pool.unpin(leased, cold=True)

    assert pool.free_blocks() == [1, 2, leased]


def test_the_copy_of_an_evicted_block_is_cached_in_its_place() -> None:
    pool, index = make_pool(3)
    first, second, third = (pool.allocate() for _ in range(3))
    publish(index, [first])
    publish(index, [second])
    publish(index, [third], first_token=100)
    pool.release([first])
    pool.release([second])
    pool.pin(second)
    pool.release([third])
    pool.allocate()

    pool.unpin(second, cold=False)

    assert pool.num_evictable == 2
    assert pool.free_blocks() == [third, second]


def test_a_pinned_block_is_never_allocated() -> None:
    pool, _ = make_pool(2)
    block = pool.allocate()
    assert pool.pin(block)
    assert not pool.pin(block)

    pool.release([block])

    assert pool.num_free == 1
    assert not pool.unpin(block, cold=False)
    assert pool.unpin(block, cold=False)
    assert pool.num_free == 2


def test_reuse_drops_the_full_entry_and_the_tail_entries_of_a_block() -> None:
    pool, index = make_pool(1)
    block = pool.allocate()
    chain = publish(index, [block])
    index.publish(chain, 2, block)
    pool.release([block])
    assert index.match(chain, 4).num_tokens == 3

    pool.allocate()

    assert index.match(chain, 4).num_tokens == 0
    index.check_integrity()


@given(
    st.lists(st.tuples(st.sampled_from(["allocate", "hold", "release", "pin", "unpin"]), st.data()))
)
def test_free_and_used_blocks_are_all_blocks(operations) -> None:
    pool, _ = make_pool(5)
    refs, pins = [0] * 5, [0] * 5
    for name, data in operations:
        used = [b for b in range(5) if refs[b]]
        pinned = [b for b in range(5) if pins[b]]
        if name == "allocate" and pool.num_free:
            refs[pool.allocate()] += 1
        elif name == "hold" and used:
            block = data.draw(st.sampled_from(used))
            pool.attach(block)
            refs[block] += 1
        elif name == "release" and used:
            block = data.draw(st.sampled_from(used))
            pool.release([block])
            refs[block] -= 1
        elif name == "pin" and used:
            block = data.draw(st.sampled_from(used))
            pool.pin(block)
            pins[block] += 1
        elif name == "unpin" and pinned:
            block = data.draw(st.sampled_from(pinned))
            pool.unpin(block, cold=data.draw(st.booleans()))
            pins[block] -= 1
        pool.check_integrity(refs, pins)
