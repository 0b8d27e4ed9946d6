"""Any order of calls: every sequence reads its own tokens back through its block table.

The model keeps what each slot of the pool was written with: the tokens up to and including its own,
which is all that a key and a value depend on. It carries out copies and swaps as a device would.
"""

from collections.abc import Iterable

import pytest
from cached_sequences import BLOCK_SIZE, make_sequence
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxpaged.cache.block_manager import BlockChanges, BlockManager
from jaxpaged.errors import OutOfBlocks
from jaxpaged.sequence import Sequence, SequenceStatus

NUM_BLOCKS = 12

Slots = dict[int, tuple[int, ...]]
"""Offset in the block, and the tokens the slot was computed from."""

PROMPTS = st.builds(
    # Few beginnings and few tokens, so that prompts share blocks and chains branch.
    lambda start, length, tail: (*(start * 40)[:length], *tail),
    st.sampled_from([(0,), (1,), (0, 0, 0, 0, 1)]),
    st.integers(0, 24),
    st.lists(st.integers(0, 1), min_size=1, max_size=5),
)


def pick(data: st.DataObject, sequences: list[Sequence]) -> Sequence:
    return sequences[data.draw(st.integers(0, len(sequences) - 1))]


class BlockMachine(RuleBasedStateMachine):
    """The manager beside a pool whose contents are known."""

    window: int | None = None
    prefix_cache = True
    reserved_tokens = 0

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(
            NUM_BLOCKS,
            BLOCK_SIZE,
            window=self.window,
            prefix_cache=self.prefix_cache,
            reserved_tokens=self.reserved_tokens,
        )
        self.pool: list[Slots] = [{} for _ in range(NUM_BLOCKS)]
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.swapped: list[tuple[Sequence, dict[int, Slots]]] = []
        self.num_made = 0

    # The model

    def snapshot(self) -> object:
        tables = [list(s.block_table) for s in [*self.running, *self.waiting]]
        allocator = self.manager.allocator
        counts = [allocator.ref_count(block) for block in range(NUM_BLOCKS)]
        return tables, counts, allocator.num_free, allocator.kept

    def slot(self, sequence: Sequence, position: int) -> tuple[int, ...] | None:
        block_id = sequence.block_table[position // BLOCK_SIZE]
        assert block_id is not None, f"position {position} was given back"
        return self.pool[block_id].get(position % BLOCK_SIZE)

    def check_seen(self, sequence: Sequence, query: int) -> None:
        """All keys before the query that it sees are the sequence's own."""
        first = 0 if self.window is None else max(0, query - self.window + 1)
        for position in range(first, query):
            expected = tuple(sequence.token_ids[: position + 1])
            assert self.slot(sequence, position) == expected

    def apply(self, sequence: Sequence, before: list[int | None], changes: BlockChanges) -> None:
        """Copies as a device does, and finds the table again from the updates."""
        sources = [dict(self.pool[source]) for source, _ in changes.copies]
        for (_, target), slots in zip(changes.copies, sources, strict=True):
            self.pool[target] = slots
        rebuilt = dict(enumerate(before)) | dict(changes.updates)
        assert list(rebuilt.values()) == sequence.block_table
        new = [block for _, block in changes.updates]
        assert not set(new) & set(before)
        self.spoil(set(new) - {target for _, target in changes.copies})

    def spoil(self, blocks: Iterable[int | None]) -> None:
        """A new block holds anything: reading what was not written must show."""
        for block in blocks:
            assert block is not None
            self.pool[block] = dict.fromkeys(range(BLOCK_SIZE), (-1,))

    def expected_hits(self, sequence: Sequence) -> int:
        """The longest chain of the index, sought among all its blocks."""
        if not self.prefix_cache or sequence.request.params.prompt_logprobs is not None:
            return 0
        known = {self.pool[block].get(BLOCK_SIZE - 1) for block in self.manager.allocator.kept}
        prompt = sequence.request.prompt_ids
        num_hit = 0
        while num_hit + BLOCK_SIZE < len(prompt) and prompt[: num_hit + BLOCK_SIZE] in known:
            num_hit += BLOCK_SIZE
        return num_hit

    def expected_cost(self, sequence: Sequence, num_hit: int) -> int:
        """Blocks of the sequence's table that nobody holds now."""
        prompt = sequence.request.prompt_ids
        held = {
            self.pool[block].get(BLOCK_SIZE - 1)
            for block in self.manager.allocator.kept
            if self.manager.allocator.ref_count(block)
        }
        first_seen = 0 if self.window is None else max(0, num_hit - self.window + 1)
        return sum(
            prompt[: start + BLOCK_SIZE] not in held or start >= num_hit
            for start in range(0, max(sequence.num_tokens, self.reserved_tokens), BLOCK_SIZE)
            if start + BLOCK_SIZE > first_seen
        )

    # What happens to sequences

    @rule(prompt=PROMPTS, scores=st.booleans())
    def add(self, prompt: tuple[int, ...], scores: bool) -> None:
        self.num_made += 1
        logprobs = 0 if scores and len(prompt) % 3 == 0 else None
        sequence = make_sequence(prompt, request_id=self.num_made, prompt_logprobs=logprobs)
        self.waiting.append(sequence)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        sequence = pick(data, self.waiting)
        expected = self.expected_hits(sequence)
        assert self.manager.cached_tokens(sequence) == expected
        before = self.snapshot()
        fits = self.expected_cost(sequence, expected) <= self.manager.allocator.num_free
        assert self.manager.can_admit(sequence) == fits
        if not fits:
            with pytest.raises(OutOfBlocks, match="blocks asked for"):
                self.manager.admit(sequence)
            assert self.snapshot() == before
            return
        sequence.num_computed = self.manager.admit(sequence)
        assert sequence.num_computed == expected
        held = max(sequence.num_tokens, self.reserved_tokens)
        assert len(sequence.block_table) == -(-held // BLOCK_SIZE)
        self.spoil(sequence.block_table[expected // BLOCK_SIZE :])
        self.waiting.remove(sequence)
        self.run(sequence)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), length=st.integers(1, 9))
    def compute(self, data: st.DataObject, length: int) -> None:
        sequence = pick(data, self.running)
        self.manager.release_outside(sequence)
        start = sequence.num_computed
        stop = min(start + length, sequence.num_tokens)
        before, table = self.snapshot(), list(sequence.block_table)
        if not self.manager.can_hold(sequence, start, stop):
            with pytest.raises(OutOfBlocks, match="blocks asked for"):
                self.manager.prepare(sequence, start, stop)
            assert self.snapshot() == before
            return
        self.apply(sequence, table, self.manager.prepare(sequence, start, stop))
        self.manager.register(sequence, stop)
        for position in range(start, stop):
            self.write(sequence, position)
        for query in range(start, stop):
            self.check_seen(sequence, query)
        sequence.num_computed = stop

    def write(self, sequence: Sequence, position: int) -> None:
        block_id = sequence.block_table[position // BLOCK_SIZE]
        assert block_id is not None
        others = [s for s in self.running if s is not sequence]
        assert not any(block_id in s.block_table for s in others), "a shared block is written to"
        self.pool[block_id][position % BLOCK_SIZE] = tuple(sequence.token_ids[: position + 1])

    @precondition(lambda self: self.running)
    @rule(data=st.data(), token=st.integers(0, 1))
    def sample(self, data: st.DataObject, token: int) -> None:
        sequence = pick(data, self.running)
        if sequence.num_left == 0:
            sequence.token_ids.append(token)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = pick(data, self.running)
        self.num_made += 1
        child = Sequence(request=parent.request, sample=self.num_made, max_tokens=100)
        child.token_ids[:] = parent.token_ids
        self.manager.fork(parent, child)
        child.num_computed = parent.num_computed
        self.run(child)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        sequence = pick(data, self.running)
        self.leave(sequence)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        sequence = pick(data, self.running)
        self.leave(sequence)
        sequence.status, sequence.num_computed = SequenceStatus.WAITING, 0
        self.waiting.append(sequence)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        sequence = pick(data, self.running)
        self.manager.release_outside(sequence)
        saved = {
            index: dict(self.pool[block])
            for index, block in enumerate(sequence.block_table)
            if block is not None and index * BLOCK_SIZE < sequence.num_computed
        }
        self.leave(sequence)
        sequence.status = SequenceStatus.SWAPPED
        self.swapped.append((sequence, saved))

    @precondition(lambda self: self.swapped)
    @rule()
    def swap_in(self) -> None:
        sequence, saved = self.swapped[0]
        before = self.snapshot()
        if not self.manager.can_restore(sequence):
            with pytest.raises(OutOfBlocks, match="blocks asked for"):
                self.manager.restore(sequence)
            assert self.snapshot() == before
            return
        self.manager.restore(sequence)
        self.spoil(block for block in sequence.block_table if block is not None)
        for index, slots in saved.items():
            block = sequence.block_table[index]
            assert block is not None
            self.pool[block] = dict(slots)
        del self.swapped[0]
        self.run(sequence)

    @rule()
    def drop_cache(self) -> None:
        self.manager.drop_cache()
        assert self.manager.allocator.num_cached == 0

    def run(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.RUNNING
        self.running.append(sequence)

    def leave(self, sequence: Sequence) -> None:
        self.manager.free(sequence)
        assert sequence.block_table == []
        self.running.remove(sequence)

    # What always holds

    @invariant()
    def accounting_holds(self) -> None:
        swapped = [sequence for sequence, _ in self.swapped]
        self.manager.check_integrity([*self.running, *self.waiting, *swapped])
        held = {b for s in self.running for b in s.block_table if b is not None}
        assert self.manager.allocator.num_free == NUM_BLOCKS - len(held)

    @invariant()
    def every_sequence_reads_its_own_tokens(self) -> None:
        for sequence in self.running:
            self.check_seen(sequence, sequence.num_computed)

    @invariant()
    def kept_blocks_are_full_and_of_different_chains(self) -> None:
        chains = [self.pool[block].get(BLOCK_SIZE - 1) for block in self.manager.allocator.kept]
        assert len(set(chains)) == len(chains)
        for block, chain in zip(self.manager.allocator.kept, chains, strict=True):
            assert chain is not None
            assert len(chain) % BLOCK_SIZE == 0
            first = len(chain) - BLOCK_SIZE
            expected = {offset: chain[: first + offset + 1] for offset in range(BLOCK_SIZE)}
            assert self.pool[block] == expected

    @invariant()
    def kept_chains_have_their_beginnings(self) -> None:
        kept = {self.pool[block].get(BLOCK_SIZE - 1) for block in self.manager.allocator.kept}
        for chain in kept:
            assert chain is not None
            assert len(chain) == BLOCK_SIZE or chain[:-BLOCK_SIZE] in kept

    def teardown(self) -> None:
        for sequence in self.running:
            self.manager.free(sequence)
        self.manager.check_integrity([])
        assert self.manager.allocator.num_free == NUM_BLOCKS
        self.manager.drop_cache()
        self.manager.check_integrity([])
        assert sorted(self.manager.allocator.allocate(NUM_BLOCKS)) == list(range(NUM_BLOCKS))


class WindowMachine(BlockMachine):
    window = 6


class NarrowWindowMachine(BlockMachine):
    window = 1


class ColdMachine(BlockMachine):
    prefix_cache = False


class StaticMachine(ColdMachine):
    reserved_tokens = 5 * BLOCK_SIZE


TestBlocks = BlockMachine.TestCase
TestWindow = WindowMachine.TestCase
TestNarrowWindow = NarrowWindowMachine.TestCase
TestCold = ColdMachine.TestCase
TestStatic = StaticMachine.TestCase
TestBlocks.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestWindow.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)
TestNarrowWindow.settings = settings(max_examples=15, stateful_step_count=40, deadline=None)
TestCold.settings = settings(max_examples=15, stateful_step_count=40, deadline=None)
TestStatic.settings = settings(max_examples=15, stateful_step_count=40, deadline=None)
