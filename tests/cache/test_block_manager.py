"""Model-based test of allocator and block manager: any order of calls keeps the accounting."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxpaged.cache.block_allocator import BlockAllocator
from jaxpaged.cache.block_manager import BlockManager
from jaxpaged.cache.capacity import blocks_for
from jaxpaged.errors import OutOfBlocks
from jaxpaged.request import Request
from jaxpaged.sequence import Sequence

NUM_BLOCKS, BLOCK_SIZE = 12, 4


def make_sequence(request_id: int, num_tokens: int) -> Sequence:
    request = Request(request_id=request_id, prompt_ids=tuple(range(num_tokens)))
    return Sequence(request=request, max_tokens=100)


class BlockMachine(RuleBasedStateMachine):
    """Drives the manager beside a naive model: how many blocks each sequence must have."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
        self.sequences: list[Sequence] = []
        self.forks: list[list[int]] = []

    def expected_free(self) -> int:
        held = {b for s in self.sequences for b in s.block_table}
        return NUM_BLOCKS - len(held | {b for table in self.forks for b in table})

    @rule(num_tokens=st.integers(1, 30))
    def add(self, num_tokens: int) -> None:
        sequence = make_sequence(len(self.sequences), num_tokens)
        needed = blocks_for(num_tokens, BLOCK_SIZE)
        free = self.expected_free()
        assert self.manager.can_hold(sequence, num_tokens) == (needed <= free)
        if needed > free:
            with pytest.raises(OutOfBlocks, match=f"{needed} blocks asked for, {free} are free"):
                self.manager.allocate(sequence, num_tokens)
            assert sequence.block_table == []
            return
        self.manager.allocate(sequence, num_tokens)
        sequence.num_computed = num_tokens
        self.sequences.append(sequence)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), more=st.integers(1, 9))
    def append(self, data: st.DataObject, more: int) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        sequence.token_ids.extend([0] * more)
        if self.manager.can_hold(sequence, sequence.num_tokens):
            before = list(sequence.block_table)
            self.manager.allocate(sequence, sequence.num_tokens)
            assert sequence.block_table[: len(before)] == before
            assert len(sequence.block_table) == max(
                len(before), blocks_for(sequence.num_tokens, BLOCK_SIZE)
            )

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        self.manager.free(sequence)
        assert sequence.block_table == []
        self.sequences.remove(sequence)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        table = list(data.draw(st.sampled_from(self.sequences)).block_table)
        self.manager.allocator.fork(table)
        self.forks.append(table)

    @precondition(lambda self: self.forks)
    @rule()
    def free_fork(self) -> None:
        self.manager.allocator.free(self.forks.pop())

    @invariant()
    def accounting_holds(self) -> None:
        tables = [s.block_table for s in self.sequences] + self.forks
        self.manager.allocator.check_integrity(tables)
        assert self.manager.allocator.num_free == self.expected_free()

    def teardown(self) -> None:
        for sequence in self.sequences:
            self.manager.free(sequence)
        for table in self.forks:
            self.manager.allocator.free(table)
        assert self.manager.allocator.num_free == NUM_BLOCKS


TestBlockMachine = BlockMachine.TestCase
TestBlockMachine.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


def test_integrity_check_names_a_leaked_block() -> None:
    allocator = BlockAllocator(3)
    allocator.allocate(2)
    with pytest.raises(AssertionError, match="block 1 has reference count 1, 0 tables contain it"):
        allocator.check_integrity([[0]])


def test_freeing_twice_is_caught() -> None:
    allocator = BlockAllocator(2)
    blocks = allocator.allocate(1)
    allocator.free(blocks)
    with pytest.raises(AssertionError, match="block 0 is freed twice"):
        allocator.free(blocks)


def test_shared_block_is_free_only_when_the_last_table_lets_go() -> None:
    allocator = BlockAllocator(1)
    blocks = allocator.allocate(1)
    allocator.fork(blocks)
    allocator.free(blocks)
    assert allocator.num_free == 0
    allocator.free(blocks)
    assert allocator.num_free == 1


def test_watermark_counts_only_beside_other_sequences() -> None:
    manager = BlockManager(10, BLOCK_SIZE, watermark=0.2)
    whole_pool = make_sequence(0, 10 * BLOCK_SIZE)
    assert manager.can_admit(whole_pool)
    first = make_sequence(1, BLOCK_SIZE)
    manager.allocate(first, first.num_tokens)
    assert not manager.can_admit(make_sequence(2, 8 * BLOCK_SIZE))
    assert manager.can_admit(make_sequence(3, 7 * BLOCK_SIZE))
