"""The allocator alone: counts, the order of reuse, and what the integrity check notices."""

import pytest

from jaxpaged.cache.block_allocator import BlockAllocator
from jaxpaged.errors import OutOfBlocks


def allocator_with_cached(num_blocks: int, order: list[int]) -> BlockAllocator:
    """All blocks cached, to be evicted in the order given."""
    allocator = BlockAllocator(num_blocks)
    for block_id in allocator.allocate(num_blocks):
        allocator.keep(block_id)
    allocator.free(order)
    return allocator


def test_integrity_check_names_a_leaked_block() -> None:
    allocator = BlockAllocator(3)
    allocator.allocate(2)
    with pytest.raises(AssertionError, match="block 1 has reference count 1, 0 tables contain it"):
        allocator.check_integrity([[0, None]])


def test_freeing_twice_is_caught() -> None:
    allocator = BlockAllocator(2)
    blocks = allocator.allocate(1)
    allocator.free(blocks)
    with pytest.raises(AssertionError, match="block 0 is freed twice"):
        allocator.free(blocks)


def test_a_free_block_can_be_neither_shared_nor_kept() -> None:
    allocator = BlockAllocator(1)
    with pytest.raises(AssertionError, match="block 0 is free, it cannot be shared"):
        allocator.share([0])
    with pytest.raises(AssertionError, match="block 0 is free, it cannot be kept"):
        allocator.keep(0)


def test_shared_block_is_free_only_when_the_last_table_lets_go() -> None:
    allocator = BlockAllocator(1)
    blocks = allocator.allocate(1)
    allocator.share(blocks)
    allocator.free(blocks)
    assert allocator.num_free == 0
    allocator.free(blocks)
    assert allocator.num_free == 1


def test_too_many_blocks_asked_for_take_none_and_evict_none() -> None:
    allocator = allocator_with_cached(3, [0, 1, 2])
    with pytest.raises(OutOfBlocks, match="4 blocks asked for, 3 are free"):
        allocator.allocate(4)
    assert allocator.num_free == allocator.num_cached == 3


def test_kept_blocks_count_as_free_and_are_evicted_after_all_others_oldest_first() -> None:
    evicted: list[int] = []

    def evict(block_id: int) -> None:
        evicted.append(block_id)
        allocator.drop(block_id)

    allocator = BlockAllocator(5, on_evict=evict)
    blocks = allocator.allocate(4)
    for block_id in blocks[:3]:
        allocator.keep(block_id)
    allocator.free([2, 0, 3, 1])
    assert (allocator.num_free, allocator.num_cached, allocator.num_used) == (5, 3, 0)
    assert allocator.allocate(2) == [4, 3]
    assert evicted == []
    assert allocator.allocate(2) == [2, 0]
    assert evicted == [2, 0]
    allocator.check_integrity([[4, 3], [2, 0]])


def test_a_cached_block_lives_again_and_becomes_the_youngest() -> None:
    allocator = allocator_with_cached(3, [0, 1, 2])
    allocator.share([0])
    assert (allocator.ref_count(0), allocator.num_free) == (1, 2)
    allocator.free([0])
    assert allocator.allocate(3) == [1, 2, 0]


def test_touching_moves_a_cached_block_and_no_other() -> None:
    allocator = allocator_with_cached(3, [0, 1, 2])
    allocator.share([2])
    allocator.touch(0)
    allocator.touch(2)
    assert allocator.allocate(2) == [1, 0]
    allocator.check_integrity([[1, 0], [2]])


def test_a_dropped_block_is_free_at_once_or_when_it_is_let_go() -> None:
    allocator = allocator_with_cached(2, [0, 1])
    allocator.share([1])
    allocator.drop(0)
    allocator.drop(1)
    assert (allocator.num_cached, allocator.num_free) == (0, 1)
    allocator.free([1])
    assert allocator.num_free == 2
    allocator.check_integrity([])


def test_an_evicting_owner_may_drop_more_than_the_one_block() -> None:
    def evict(_: int) -> None:
        for block_id in range(3):
            allocator.drop(block_id)

    allocator = BlockAllocator(3, on_evict=evict)
    for block_id in allocator.allocate(3):
        allocator.keep(block_id)
    allocator.free([0, 1, 2])
    assert allocator.allocate(1) == [0]
    assert (allocator.num_cached, allocator.num_free) == (0, 2)
