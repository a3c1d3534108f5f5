import itertools

import numpy as np
import pytest

from engine.blocks.prefix_index import TOKEN_DTYPE, PrefixChain, PrefixIndex


def chain_of(ids, namespace: bytes = b"tenant", **fields) -> PrefixChain:
    return PrefixChain(namespace, np.array(list(ids), dtype=TOKEN_DTYPE), 4, **fields)


def publish_all(index: PrefixIndex, chain: PrefixChain, num_tokens: int, first_block: int) -> None:
    for number in range(num_tokens // 4):
        index.publish(chain, 4 * (number + 1), first_block + number)


def test_a_key_names_the_whole_prefix_and_its_namespace() -> None:
    keys = [
        chain_of([1, 2, 3, 4]).at(4).key,
        chain_of([1, 2, 3, 4], namespace=b"other").at(4).key,
        chain_of([0, 0, 0, 0, 1, 2, 3, 4]).at(8).key,
        chain_of([1, 2, 3, 4]).at(3).key,
    ]
    assert len(set(keys)) == len(keys)
    assert chain_of([1, 2, 3, 4, 9]).at(4).key == keys[0]


def test_a_match_leaves_one_token_to_compute() -> None:
    index = PrefixIndex(4)
    chain = chain_of(range(8))
    publish_all(index, chain, 8, first_block=10)

    exact = index.match(chain, 8)
    longer = index.match(chain_of(range(9)), 9)

    # The last block is cut: its first slots come by copy.
    assert (exact.blocks, exact.num_tokens, exact.tail_source) == ([10], 7, 11)
    assert (longer.blocks, longer.num_tokens, longer.tail_source) == ([10, 11], 8, None)


def test_the_longest_fitting_tail_is_copied() -> None:
    index = PrefixIndex(4)
    chain = chain_of(range(7))
    publish_all(index, chain, 4, first_block=10)
    index.publish(chain, 5, 20)
    index.publish(chain, 7, 21)

    assert index.match(chain_of([0, 1, 2, 3, 4, 99]), 6).tail_source == 20
    assert index.match(chain_of([*range(7), 99]), 8).tail_source == 21
    assert index.match(chain_of([*range(7), 99]), 8).num_tokens == 7
    assert index.match(chain_of([0, 1, 2, 3, 99, 99]), 6).tail_source is None


def test_a_tail_exposes_only_its_own_slots() -> None:
    index = PrefixIndex(4)
    publisher = chain_of([1, 2, 3, 4])
    index.publish(publisher, 2, 10)

    match = index.match(publisher, 4)

    assert (match.num_tokens, match.tail_source) == (2, 10)


def test_other_namespaces_see_nothing() -> None:
    index = PrefixIndex(4)
    publish_all(index, chain_of(range(8)), 8, first_block=10)

    assert index.match(chain_of(range(8), namespace=b"other"), 8).num_tokens == 0


def test_the_first_block_of_a_prefix_serves_until_it_is_dropped() -> None:
    index = PrefixIndex(4)
    for block in (10, 20):
        index.publish(chain_of(range(4)), 4, block)
    assert index.match(chain_of(range(5)), 5).blocks == [10]
    assert index.is_serving(10)
    assert not index.is_serving(20)

    index.drop(10)

    assert index.match(chain_of(range(5)), 5).blocks == [20]
    index.check_integrity()


def test_dropping_a_copy_leaves_the_first_block_in_place() -> None:
    index = PrefixIndex(4)
    for block in (10, 20):
        index.publish(chain_of(range(4)), 4, block)

    index.drop(20)

    assert index.match(chain_of(range(5)), 5).blocks == [10]


def test_a_match_has_no_side_effects() -> None:
    index = PrefixIndex(4)
    chain = chain_of(range(8))
    publish_all(index, chain, 8, first_block=10)

    assert index.match(chain, 8) == index.match(chain, 8)
    index.check_integrity()


def test_publishing_twice_changes_nothing() -> None:
    index = PrefixIndex(4)
    chain = chain_of(range(6))
    for num_tokens in (4, 6, 4, 6):
        index.publish(chain, num_tokens, 10 if num_tokens == 4 else 11)

    index.drop(10)
    index.drop(11)

    assert index.match(chain, 6).num_tokens == 0


def test_a_disabled_index_stays_empty() -> None:
    index = PrefixIndex(4, enabled=False)
    publish_all(index, chain_of(range(8)), 8, first_block=10)

    assert index.match(chain_of(range(8)), 8).num_tokens == 0


@pytest.mark.parametrize("namespaces", [(b"a", b"a"), (b"a", b"b")])
def test_a_hash_that_always_collides_serves_no_foreign_block(namespaces) -> None:
    def collide(data: bytes) -> bytes:
        return b"same"

    index = PrefixIndex(4)
    prompts = [
        chain_of([*head, *tail], namespace=namespace, digest=collide)
        for namespace in namespaces
        for head, tail in itertools.product([[1] * 4, [2] * 4], repeat=2)
    ]
    held = {}
    for number, chain in enumerate(prompts):
        publish_all(index, chain, 8, first_block=10 * number)
        held[10 * number] = (chain.at(0).token_ids, chain.packed(0, 4))
        held[10 * number + 1] = (chain.at(0).token_ids, chain.packed(0, 8))

    for chain in prompts:
        match = index.match(chain, 8, known=())
        namespace = chain.at(0).token_ids
        assert [held[block] for block in match.blocks] == [(namespace, chain.packed(0, 4))]
        assert match.tail_source is not None
        assert held[match.tail_source] == (namespace, chain.packed(0, 8))
