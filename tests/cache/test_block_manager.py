"""The manager's promises one by one; `test_block_machine.py` has them in any order of calls."""

import pytest
from cached_sequences import BLOCK_SIZE, cached, computed, make_sequence, remembered

from jaxpaged.cache.block_manager import BlockManager
from jaxpaged.errors import OutOfBlocks
from jaxpaged.sequence import Sequence, SequenceStatus

A = tuple(range(10, 22))
"""Three full blocks."""
B = tuple(range(30, 42))


def admitted(manager: BlockManager, num_tokens: int) -> Sequence:
    """A sequence that shares nothing with any other."""
    sequence = make_sequence((num_tokens,) * num_tokens)
    manager.admit(sequence)
    return sequence


# Admission


def test_watermark_counts_only_beside_other_sequences() -> None:
    manager = BlockManager(10, BLOCK_SIZE, watermark=0.2)
    assert manager.can_admit(make_sequence((1,) * 10 * BLOCK_SIZE))
    admitted(manager, BLOCK_SIZE)
    assert not manager.can_admit(make_sequence((2,) * 8 * BLOCK_SIZE))
    assert manager.can_admit(make_sequence((3,) * 7 * BLOCK_SIZE))


def test_a_pool_full_of_cached_blocks_is_not_in_use() -> None:
    manager = BlockManager(10, BLOCK_SIZE, watermark=0.2)
    remembered(manager, (1,) * 10 * BLOCK_SIZE)
    assert manager.allocator.num_cached == 10
    assert manager.can_admit(make_sequence((2,) * 10 * BLOCK_SIZE))


def test_admission_starts_behind_the_longest_known_prefix() -> None:
    manager = BlockManager(20, BLOCK_SIZE)
    first = computed(manager, make_sequence((*A, 1, 2)))
    second = make_sequence((*A[:8], 99, *A[9:], 3))
    assert manager.admit(second) == 8
    assert second.block_table[:2] == first.block_table[:2]
    assert not set(second.block_table[2:]) & set(first.block_table)
    assert (manager.num_hits, manager.num_hit_tokens) == (1, 8)
    manager.check_integrity([first, second])


@pytest.mark.parametrize(("num_prompt", "num_hit"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_at_least_one_prompt_token_is_left_to_compute(num_prompt: int, num_hit: int) -> None:
    manager = BlockManager(20, BLOCK_SIZE)
    remembered(manager, A)
    assert manager.admit(make_sequence(A[:num_prompt])) == num_hit


def test_prompt_logprobs_start_from_nothing_and_still_serve_others() -> None:
    manager = BlockManager(20, BLOCK_SIZE)
    remembered(manager, A[:4])
    scored = make_sequence((*A, 1), prompt_logprobs=1)
    assert manager.cached_tokens(scored) == 0
    computed(manager, scored)
    assert (manager.num_hits, cached(manager, A)) == (0, 12)


def test_without_the_prefix_cache_nothing_is_kept() -> None:
    manager = BlockManager(20, BLOCK_SIZE, prefix_cache=False)
    remembered(manager, A)
    assert (cached(manager, A), manager.allocator.num_cached) == (0, 0)


def test_cached_hits_come_out_of_the_free_blocks() -> None:
    manager = BlockManager(5, BLOCK_SIZE)
    remembered(manager, A)
    other = admitted(manager, 2 * BLOCK_SIZE)
    assert manager.allocator.num_free == manager.allocator.num_cached == 3
    again = make_sequence((*A, 1))
    assert not manager.can_admit(again)
    with pytest.raises(OutOfBlocks, match="4 blocks asked for, 3 are free"):
        manager.admit(again)
    assert (again.block_table, manager.num_hits, manager.allocator.num_cached) == ([], 0, 3)
    manager.free(other)
    assert manager.can_admit(again)
    assert manager.admit(again) == 12


def test_held_hits_cost_nothing() -> None:
    manager = BlockManager(5, BLOCK_SIZE)
    computed(manager, make_sequence((*A, 1)))
    again = make_sequence((*A, 2))
    assert manager.can_admit(again)
    assert manager.admit(again) == 12


def test_admission_does_not_evict_its_own_hits() -> None:
    manager = BlockManager(4, BLOCK_SIZE)
    remembered(manager, A)
    remembered(manager, (*B[:2], 1, 2))
    again = make_sequence((*A, 1))
    assert manager.admit(again) == 12
    assert manager.num_evictions == 1


def test_rows_of_one_prefix_compute_it_once() -> None:
    manager = BlockManager(100, BLOCK_SIZE)
    sequences = [computed(manager, make_sequence((*A, i, i + 1))) for i in range(20)]
    assert manager.allocator.num_used == 3 + 20
    assert manager.num_hit_tokens == 19 * 12
    manager.check_integrity(sequences)


# Eviction


def test_the_least_recently_released_chain_goes_first_and_its_tail_before_its_head() -> None:
    manager = BlockManager(6, BLOCK_SIZE)
    remembered(manager, A)
    remembered(manager, B)
    held: list[Sequence] = []
    for known_a, known_b in [(8, 12), (4, 12), (0, 12), (0, 8)]:
        held.append(admitted(manager, BLOCK_SIZE))
        assert (cached(manager, A), cached(manager, B)) == (known_a, known_b)
    assert manager.num_evictions == 4
    manager.check_integrity(held)


def test_a_hit_makes_a_chain_young_again() -> None:
    manager = BlockManager(7, BLOCK_SIZE)
    remembered(manager, A)
    remembered(manager, B)
    remembered(manager, (*A, 1))
    admitted(manager, 2 * BLOCK_SIZE)
    assert (cached(manager, A), cached(manager, B)) == (12, 8)


def test_a_head_under_the_block_of_another_outlives_the_tail() -> None:
    manager = BlockManager(4, BLOCK_SIZE)
    remembered(manager, A[:4])
    # Has its own copy of the head, and its second block goes behind the head of the first.
    manager.free(computed(manager, make_sequence(A[:8], prompt_logprobs=0)))
    assert (cached(manager, A), manager.allocator.num_cached) == (8, 2)
    admitted(manager, 3 * BLOCK_SIZE)
    assert cached(manager, A) == 4


def test_a_hit_outside_the_window_makes_a_chain_young_again() -> None:
    manager = BlockManager(7, BLOCK_SIZE, window=BLOCK_SIZE)
    remembered(manager, A)
    remembered(manager, B)
    assert manager.admit(make_sequence((*A, 1))) == 12
    admitted(manager, 3 * BLOCK_SIZE)
    assert (cached(manager, A), cached(manager, B)) == (12, 0)


def test_a_chain_is_as_young_as_the_last_fork_that_let_go_of_it() -> None:
    manager = BlockManager(6, BLOCK_SIZE)
    remembered(manager, A[:4])
    parent = computed(manager, make_sequence(A[:8], prompt_logprobs=0))
    child = make_sequence(A[:8])
    manager.fork(parent, child)
    manager.free(parent)
    remembered(manager, B[:4])
    manager.free(child)
    admitted(manager, 4 * BLOCK_SIZE)
    assert (cached(manager, A), cached(manager, B)) == (8, 0)


def test_what_follows_an_evicted_block_is_free_at_once() -> None:
    manager = BlockManager(6, BLOCK_SIZE, window=BLOCK_SIZE)
    long = computed(manager, make_sequence((*A, 1)))
    manager.release_outside(long)
    assert long.block_table[:2] == [None, None]
    assert manager.allocator.num_cached == 2
    admitted(manager, 4 * BLOCK_SIZE)
    assert (cached(manager, A), manager.allocator.num_cached) == (0, 0)
    manager.free(long)
    assert manager.allocator.num_cached == 0


def test_a_dropped_cache_gives_no_hits_and_harms_no_sequence() -> None:
    manager = BlockManager(10, BLOCK_SIZE)
    remembered(manager, B)
    running = computed(manager, make_sequence((*A, 1)))
    manager.drop_cache()
    assert (cached(manager, A), cached(manager, B), manager.allocator.num_cached) == (0, 0, 0)
    assert manager.num_evictions == 0
    manager.check_integrity([running])
    manager.free(running)
    manager.check_integrity([])


def test_the_last_block_given_back_is_first_in_line_for_reuse() -> None:
    manager = BlockManager(3, BLOCK_SIZE, prefix_cache=False)
    sequence = admitted(manager, 3 * BLOCK_SIZE)
    table = list(sequence.block_table)
    manager.free(sequence)
    assert admitted(manager, 2 * BLOCK_SIZE).block_table == [table[2], table[1]]


# Registration


def test_only_full_prompt_blocks_that_are_computed_are_registered() -> None:
    manager = BlockManager(10, BLOCK_SIZE)
    sequence = make_sequence(A[:10])
    manager.admit(sequence)
    sequence.token_ids.extend([1, 2, 3])
    for num_computed, known in [(3, 0), (4, 4), (7, 4), (8, 8), (8, 8), (10, 8), (13, 8)]:
        manager.register(sequence, num_computed)
        assert cached(manager, (*A[:10], 1, 2, 3)) == known


def test_a_chain_that_is_known_keeps_its_blocks() -> None:
    manager = BlockManager(10, BLOCK_SIZE)
    first, second = make_sequence((*A[:4], 1)), make_sequence(A)
    manager.admit(first)
    manager.admit(second)
    manager.register(first, 4)
    manager.register(second, 12)
    third = make_sequence((*A, 1))
    assert manager.admit(third) == 12
    assert third.block_table[:3] == [first.block_table[0], *second.block_table[1:3]]
    manager.check_integrity([first, second, third])


def test_a_chain_whose_head_was_evicted_is_registered_anew() -> None:
    manager = BlockManager(6, BLOCK_SIZE)
    remembered(manager, A[:4])
    second = make_sequence(A, prompt_logprobs=0)
    manager.admit(second)
    manager.register(second, 8)
    other = admitted(manager, 3 * BLOCK_SIZE)
    assert cached(manager, A) == 0
    manager.register(second, 12)
    assert cached(manager, A) == 12
    manager.free(other)
    third = make_sequence((*A, 1))
    manager.admit(third)
    assert third.block_table[:3] == second.block_table


# Copy-on-write


def forked(manager: BlockManager, num_tokens: int) -> tuple[Sequence, Sequence]:
    prompt = A[:num_tokens]
    parent, child = computed(manager, make_sequence(prompt)), make_sequence(prompt, request_id=1)
    manager.fork(parent, child)
    child.num_computed = parent.num_computed
    return parent, child


def test_the_first_to_write_to_a_shared_block_copies_and_the_last_writes_in_place() -> None:
    manager = BlockManager(10, BLOCK_SIZE)
    parent, child = forked(manager, 6)
    assert child.block_table == parent.block_table == [0, 1]
    assert manager.prepare(parent, 6, 7) == ([(1, 2)], [(1, 2)])
    assert manager.prepare(child, 6, 7) == ([], [])
    assert (parent.block_table, child.block_table, manager.num_copies) == ([0, 2], [0, 1], 1)
    manager.check_integrity([parent, child])


def test_forks_at_the_edge_of_a_block_copy_nothing() -> None:
    manager = BlockManager(10, BLOCK_SIZE)
    parent, child = forked(manager, 8)
    assert manager.prepare(parent, 8, 9) == ([(2, 2)], [])
    assert manager.prepare(child, 8, 9) == ([(2, 3)], [])
    assert manager.num_copies == 0


def test_a_shared_block_without_tokens_is_replaced_and_not_copied() -> None:
    manager = BlockManager(10, BLOCK_SIZE)
    parent = make_sequence(A[:8])
    parent.token_ids.append(1)
    manager.admit(parent)
    child = make_sequence(A[:8])
    manager.fork(parent, child)
    assert manager.prepare(child, 8, 9) == ([(2, 3)], [])


def test_copies_and_new_blocks_are_counted_together() -> None:
    manager = BlockManager(4, BLOCK_SIZE)
    parent, child = forked(manager, 6)
    assert manager.can_hold(child, 6, 12)
    assert not manager.can_hold(child, 6, 13)
    with pytest.raises(OutOfBlocks, match="3 blocks asked for, 2 are free"):
        manager.prepare(child, 6, 13)
    assert child.block_table == parent.block_table == [0, 1]
    assert manager.prepare(child, 6, 12) == ([(1, 2), (2, 3)], [(1, 2)])
    assert manager.can_hold(parent, 6, 7)
    assert not manager.can_hold(parent, 6, 9)


def test_a_fork_keeps_what_its_parent_gives_back() -> None:
    manager = BlockManager(10, BLOCK_SIZE)
    parent, child = forked(manager, 6)
    manager.free(parent)
    assert manager.allocator.num_used == 2
    manager.check_integrity([child])
    manager.free(child)
    assert manager.allocator.num_free == 10


# Windows


@pytest.mark.parametrize(
    ("window", "num_computed", "num_released"),
    [
        # The query at position 8 sees 5 to 8: block 0 is out.
        (4, 8, 1),
        (4, 7, 1),
        # The query at 6 sees 3 to 6.
        (4, 6, 0),
        (5, 8, 1),
        (5, 7, 0),
        (1, 8, 2),
        (1, 7, 1),
        (100, 12, 0),
    ],
)
def test_a_block_is_released_once_no_query_sees_any_of_its_keys(
    window: int, num_computed: int, num_released: int
) -> None:
    manager = BlockManager(10, BLOCK_SIZE, window=window)
    sequence = admitted(manager, 12)
    sequence.num_computed = num_computed
    manager.release_outside(sequence)
    assert [block is None for block in sequence.block_table] == [
        index < num_released for index in range(3)
    ]
    assert manager.allocator.num_free == 7 + num_released
    manager.check_integrity([sequence])


def test_hits_outside_the_window_are_not_held() -> None:
    manager = BlockManager(5, BLOCK_SIZE, window=BLOCK_SIZE)
    remembered(manager, A)
    again = make_sequence((*A, 1))
    assert manager.admit(again) == 12
    assert [block is None for block in again.block_table] == [True, True, False, False]
    assert (manager.allocator.num_used, cached(manager, A)) == (2, 12)


def test_a_restored_sequence_has_the_entries_it_had() -> None:
    manager = BlockManager(10, BLOCK_SIZE, window=6)
    remembered(manager, A)
    sequence = computed(manager, make_sequence((*A, 1)))
    manager.release_outside(sequence)
    before = [block is None for block in sequence.block_table]
    assert before == [True, True, False, False]
    manager.free(sequence)
    assert manager.can_restore(sequence)
    manager.restore(sequence)
    assert [block is None for block in sequence.block_table] == before
    manager.check_integrity([sequence])


def test_restoring_takes_no_cached_blocks_and_changes_nothing_when_it_fails() -> None:
    manager = BlockManager(4, BLOCK_SIZE)
    sequence = computed(manager, make_sequence((*A, 1)))
    manager.free(sequence)
    other = admitted(manager, BLOCK_SIZE)
    assert not manager.can_restore(sequence)
    with pytest.raises(OutOfBlocks, match="4 blocks asked for, 3 are free"):
        manager.restore(sequence)
    manager.free(other)
    assert manager.can_restore(sequence)
    manager.restore(sequence)
    assert (manager.num_hits, cached(manager, A)) == (0, 0)
    manager.register(sequence, 13)
    assert cached(manager, A) == 12


# Integrity


def test_integrity_check_names_a_sequence_with_too_few_slots() -> None:
    manager = BlockManager(4, BLOCK_SIZE)
    sequence = admitted(manager, 8)
    sequence.status = SequenceStatus.RUNNING
    sequence.num_computed = 9
    with pytest.raises(AssertionError, match="request 0 has 9 computed tokens in 8 slots"):
        manager.check_integrity([sequence])


def test_integrity_check_names_a_sequence_that_was_not_freed() -> None:
    manager = BlockManager(4, BLOCK_SIZE)
    sequence = computed(manager, make_sequence(A))
    sequence.block_table.clear()
    with pytest.raises(AssertionError, match="block 0 has reference count 1, 0 tables"):
        manager.check_integrity([sequence])


# Static reservation


def test_a_reserved_sequence_holds_all_its_blocks_from_admission_on() -> None:
    manager = BlockManager(10, BLOCK_SIZE, prefix_cache=False, reserved_tokens=4 * BLOCK_SIZE)
    first, second = admitted(manager, 1), admitted(manager, 3 * BLOCK_SIZE)
    assert len(first.block_table) == len(second.block_table) == 4
    assert not manager.can_admit(make_sequence((7,)))
    first.num_computed = 1
    changes = manager.prepare(first, 1, 3 * BLOCK_SIZE)
    assert (changes.updates, changes.copies) == ([], [])
    manager.free(second)
    assert manager.can_admit(make_sequence((7,)))
    manager.check_integrity([first])


def test_a_reserved_sequence_keeps_what_lies_outside_its_window() -> None:
    manager = BlockManager(
        10, BLOCK_SIZE, prefix_cache=False, window=2, reserved_tokens=4 * BLOCK_SIZE
    )
    sequence = admitted(manager, 3 * BLOCK_SIZE)
    sequence.num_computed = 3 * BLOCK_SIZE
    manager.release_outside(sequence)
    assert None not in sequence.block_table
