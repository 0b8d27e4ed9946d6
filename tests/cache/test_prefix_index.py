"""Chains are found by their tokens and by nothing else."""

from collections.abc import Hashable

import pytest

from jaxpaged.cache.prefix_index import PrefixIndex

SIZE = 2


class Colliding(int):
    """A token whose hash says nothing."""

    def __hash__(self) -> int:
        return 0


def insert(
    index: PrefixIndex,
    tokens: tuple[int, ...],
    blocks: list[int],
    extra: tuple[Hashable, ...] = (),
) -> None:
    node = index.root(extra)
    for place, block_id in enumerate(blocks):
        block = tokens[place * SIZE : (place + 1) * SIZE]
        node = index.find(node, block) or index.insert(node, block, block_id)


def matched(
    index: PrefixIndex, tokens: tuple[int, ...], extra: tuple[Hashable, ...] = ()
) -> list[int | None]:
    return [node.block_id for node in index.match(tokens, extra)]


def test_match_gives_the_longest_chain_of_full_blocks() -> None:
    index = PrefixIndex(SIZE)
    insert(index, (1, 2, 3, 4, 5, 6), [7, 8, 9])
    insert(index, (1, 2, 3, 5), [7, 4])
    assert matched(index, (1, 2, 3, 4, 5, 6, 1)) == [7, 8, 9]
    assert matched(index, (1, 2, 3, 4, 5)) == [7, 8]
    assert matched(index, (1, 2, 3, 5, 5, 6)) == [7, 4]
    assert matched(index, (1, 2, 9, 9, 5, 6)) == [7]
    assert matched(index, (3, 4, 5, 6)) == []
    assert matched(index, (1,)) == []
    assert [n.block_id for n in index.match((1, 2, 3, 4, 5, 6), limit=1)] == [7]


def test_the_same_tokens_behind_others_are_another_chain() -> None:
    index = PrefixIndex(SIZE)
    insert(index, (1, 1, 1, 1), [0, 1])
    insert(index, (2, 2, 1, 1), [2, 3])
    assert matched(index, (1, 1, 1, 1)) == [0, 1]
    assert matched(index, (2, 2, 1, 1)) == [2, 3]


def test_what_else_changes_keys_and_values_keeps_chains_apart() -> None:
    index = PrefixIndex(SIZE)
    insert(index, (1, 2), [0], ("adapter a",))
    assert matched(index, (1, 2), ("adapter a",)) == [0]
    assert matched(index, (1, 2), ("adapter b",)) == []
    assert matched(index, (1, 2)) == []


def test_equal_hashes_are_not_equal_chains() -> None:
    index = PrefixIndex(SIZE)
    chains = [tuple(map(Colliding, chain)) for chain in ((1, 2, 3, 4), (2, 1, 4, 3), (1, 2, 4, 3))]
    assert len({hash(chain[:SIZE]) for chain in chains}) == 1
    insert(index, chains[0], [0, 1])
    assert [matched(index, chain) for chain in chains] == [[0, 1], [], [0]]
    insert(index, chains[1], [2, 3])
    insert(index, chains[2], [0, 4])
    assert [matched(index, chain) for chain in chains] == [[0, 1], [2, 3], [0, 4]]


def test_forgetting_a_block_forgets_all_that_only_follow_it() -> None:
    index = PrefixIndex(SIZE)
    insert(index, (1, 2, 3, 4, 5, 6), [0, 1, 2])
    insert(index, (1, 2, 3, 4, 7, 7), [0, 1, 3])
    insert(index, (1, 2, 8, 8), [0, 4])
    old = index.match((1, 2, 3, 4, 5, 6))
    assert sorted(index.forget(1)) == [1, 2, 3]
    assert matched(index, (1, 2, 3, 4, 5, 6)) == [0]
    assert matched(index, (1, 2, 8, 8)) == [0, 4]
    assert [node.is_reachable for node in old] == [True, False, False]
    assert [node.block_id for node in old[2].path()] == [0]
    assert sorted(index) == [0, 4]
    assert len(index) == 2
    assert 1 not in index


def test_a_new_chain_in_the_place_of_a_forgotten_one_has_no_old_children() -> None:
    index = PrefixIndex(SIZE)
    insert(index, (1, 2, 3, 4), [0, 1])
    old = index.match((1, 2))[0]
    index.forget(0)
    insert(index, (1, 2), [5])
    assert matched(index, (1, 2, 3, 4)) == [5]
    with pytest.raises(AssertionError, match="block 6 would follow a forgotten one"):
        index.insert(old, (3, 4), 6)


def test_long_chains_are_forgotten_without_recursion() -> None:
    index = PrefixIndex(1)
    node = index.root()
    for block_id in range(5000):
        node = index.insert(node, (7,), block_id)
    assert len(index.forget(0)) == 5000
    assert len(index) == 0


@pytest.mark.parametrize(
    ("tokens", "block_id", "message"),
    [
        ((1,), 5, "a block of 1 tokens is not full"),
        ((1, 2), 5, "the chain that ends in block 5 is known"),
        ((3, 4), 0, "block 0 is in the index already"),
    ],
)
def test_wrong_insertions_are_caught(tokens: tuple[int, ...], block_id: int, message: str) -> None:
    index = PrefixIndex(SIZE)
    insert(index, (1, 2), [0])
    with pytest.raises(AssertionError, match=message):
        index.insert(index.root(), tokens, block_id)
