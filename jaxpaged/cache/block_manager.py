"""Gives sequences the blocks their tokens need, and takes them back.

Blocks come from the free ones, from the prefix cache (prompts that begin alike share the blocks of
what they have in common) and from other sequences (forks share everything until they write).
Knows nothing of scheduling policy or of arrays: what the device has to do is in `BlockChanges`.
"""

from collections.abc import Iterable
from typing import NamedTuple

from jaxpaged.cache.block_allocator import BlockAllocator
from jaxpaged.cache.capacity import blocks_for
from jaxpaged.cache.prefix_index import PrefixIndex, PrefixNode, Tokens
from jaxpaged.errors import OutOfBlocks
from jaxpaged.sequence import Sequence, SequenceStatus


class BlockChanges(NamedTuple):
    """What `BlockManager.prepare` changed.

    Attributes:
        updates: Index in the sequence's block table and its new block id, in ascending order.
        copies: Source and target block; to be copied before the step writes anything.
    """

    updates: list[tuple[int, int]]
    copies: list[tuple[int, int]]


class _Chain(NamedTuple):
    """How far a sequence's prompt is in the prefix index.

    Attributes:
        node: Of its last full block there.
        num_blocks: Full prompt blocks up to and including it.
    """

    node: PrefixNode
    num_blocks: int


class BlockManager:
    """Block tables over one pool: the only writer of `Sequence.block_table`.

    Only full blocks of prompt tokens enter the prefix index. A block there is never written again,
    so it can be shared as it is; eviction takes the least recently released chain, its tail first.

    Args:
        num_blocks: Blocks of the pool.
        block_size: Tokens per block.
        watermark: Share of the pool left free at admission.
        prefix_cache: Whether prompts share blocks with earlier ones that begin alike.
        window: Most keys, its own included, that any layer's query sees; None for all.
        reserved_tokens: Tokens that a sequence gets blocks for when it is admitted, however few it
            has: static reservation, as engines without paging do it, to compare with. It keeps
            them until it ends.

    Attributes:
        block_size: Tokens per block.
        allocator: Owner of the reference counts.
        num_hits: Admissions that found blocks in the prefix cache.
        num_hit_tokens: Tokens in those blocks.
        num_evictions: Blocks dropped from the prefix cache for their space.
        num_copies: Blocks copied because a shared one was written to.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        watermark: float = 0.0,
        prefix_cache: bool = True,
        window: int | None = None,
        reserved_tokens: int = 0,
    ) -> None:
        assert window is None or window >= 1, f"a window of {window} keys"
        self.block_size = block_size
        self.allocator = BlockAllocator(num_blocks, on_evict=self._evict)
        self.num_hits = 0
        self.num_hit_tokens = 0
        self.num_evictions = 0
        self.num_copies = 0
        self._index = PrefixIndex(block_size)
        self._chains: dict[Sequence, _Chain] = {}
        self._prefix_cache = prefix_cache
        self._window = window if not reserved_tokens else None
        self._reserved_tokens = reserved_tokens
        self._watermark_blocks = int(watermark * num_blocks)

    def missing_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks the sequence still lacks to hold its first `num_tokens` tokens."""
        return max(0, blocks_for(num_tokens, self.block_size) - len(sequence.block_table))

    def cached_tokens(self, sequence: Sequence) -> int:
        """Leading tokens that the prefix cache would give if the sequence were admitted now."""
        return len(self._hits(sequence)) * self.block_size

    def can_admit(self, sequence: Sequence) -> bool:
        """Whether all known tokens of a waiting sequence fit with the watermark left free.

        With no block in use the watermark does not count: what fits alone must be able to run.
        """
        return self._fits_beside_watermark(self._admission_cost(sequence, self._hits(sequence)))

    def admit(self, sequence: Sequence) -> int:
        """Gives a waiting sequence blocks for all its tokens (and those reserved for it), as far as
        possible from the cache.

        Hits that no query of the sequence will see get no entry in its table.

        Returns:
            Leading tokens that are computed already: whole blocks, and never the whole prompt.

        Raises:
            OutOfBlocks: Too few blocks are free; nothing has changed.
        """
        assert not sequence.block_table, f"{_name(sequence)} has blocks already"
        hits = self._hits(sequence)
        self._check_free(self._admission_cost(sequence, hits))
        num_hit_tokens = len(hits) * self.block_size
        num_outside = self._num_outside(num_hit_tokens)
        shared = _blocks(hits[num_outside:])
        # Shared first: what is held cannot be evicted for the new blocks.
        self.allocator.share(shared)
        self._touch(reversed(hits))
        new = self.allocator.allocate(self._missing_at_admission(sequence) - len(hits))
        sequence.block_table.extend([*[None] * num_outside, *shared, *new])
        if hits:
            self._chains[sequence] = _Chain(hits[-1], len(hits))
            self.num_hits += 1
            self.num_hit_tokens += num_hit_tokens
        return num_hit_tokens

    def can_restore(self, sequence: Sequence) -> bool:
        """Whether all known tokens of a swapped sequence fit with the watermark left free."""
        return self._fits_beside_watermark(self._restoration_cost(sequence))

    def restore(self, sequence: Sequence) -> None:
        """Gives a swapped sequence new blocks for all its tokens, none of them from the cache.

        The entries that `release_outside` had set to None are None again.

        Raises:
            OutOfBlocks: Too few blocks are free; nothing has changed.
        """
        assert not sequence.block_table, f"{_name(sequence)} has blocks already"
        new = self.allocator.allocate(self._restoration_cost(sequence))
        sequence.block_table.extend([*[None] * self._num_outside(sequence.num_computed), *new])

    def can_hold(self, sequence: Sequence, start: int, stop: int) -> bool:
        """Whether enough blocks are free for the sequence to write its tokens `[start, stop)`."""
        if self._owns_block_of(sequence, start, stop):
            return True
        num_new = len(self._shared_indices(sequence, start, stop))
        return num_new + self.missing_blocks(sequence, stop) <= self.allocator.num_free

    def prepare(self, sequence: Sequence, start: int, stop: int) -> BlockChanges:
        """Makes the blocks of the tokens `[start, stop)` exist and belong to the sequence alone.

        Blocks that are missing are appended. A shared block is replaced by a new one; if it holds
        tokens before `start` it has to be copied.

        Raises:
            OutOfBlocks: Too few blocks are free; nothing has changed.
        """
        changes = BlockChanges([], [])
        if self._owns_block_of(sequence, start, stop):
            return changes
        table = sequence.block_table
        shared = self._shared_indices(sequence, start, stop)
        num_missing = self.missing_blocks(sequence, stop)
        num_old = len(table)
        new = self.allocator.allocate(len(shared) + num_missing)
        table.extend(new[len(shared) :])
        for index, target in zip(shared, new, strict=False):
            source = table[index]
            assert source is not None, f"{_name(sequence)} writes to a block that it gave back"
            table[index] = target
            self.allocator.free([source])
            if index * self.block_size < start:
                changes.copies.append((source, target))
        self.num_copies += len(changes.copies)
        changes.updates.extend(zip(shared, new, strict=False))
        changes.updates.extend(enumerate(new[len(shared) :], start=num_old))
        return changes

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Lets a child without blocks share all blocks of its parent."""
        assert not child.block_table, f"{_name(child)} has blocks already"
        self.allocator.share(b for b in parent.block_table if b is not None)
        child.block_table.extend(parent.block_table)
        if parent in self._chains:
            self._chains[child] = self._chains[parent]

    def register(self, sequence: Sequence, num_computed: int) -> None:
        """Puts the full prompt blocks of the first `num_computed` tokens into the prefix index.

        A block whose chain is known already under another block stays out, and those that follow
        it go behind the known one.
        """
        limit = min(num_computed, sequence.num_prompt) // self.block_size
        chain = self._chains.get(sequence)
        if not self._prefix_cache or (chain is not None and chain.num_blocks >= limit):
            return
        if chain is None or not chain.node.is_reachable:
            # What the chain went behind was evicted: it is built anew of the sequence's own blocks.
            chain = _Chain(self._index.root(_extra(sequence)), 0)
        node, num_blocks = chain
        while num_blocks < limit:
            first = num_blocks * self.block_size
            tokens = sequence.request.prompt_ids[first : first + self.block_size]
            known = self._index.find(node, tokens) or self._insert(
                node, tokens, sequence.block_table[num_blocks]
            )
            if known is None:
                break
            node = known
            num_blocks += 1
        self._chains[sequence] = _Chain(node, num_blocks)

    def release_outside(self, sequence: Sequence) -> None:
        """Gives back the blocks that no query from `num_computed` on sees; they become None.

        Call it before a step is planned: the step's own queries still see what lies outside the
        window once it has run.
        """
        table = sequence.block_table
        # The ones before the last None were given back earlier.
        index = min(self._num_outside(sequence.num_computed), len(table)) - 1
        while index >= 0:
            block_id = table[index]
            if block_id is None:
                break
            self.allocator.free([block_id])
            table[index] = None
            index -= 1

    def free(self, sequence: Sequence) -> None:
        """Gives back all blocks of the sequence, the last ones first in line for reuse."""
        self.allocator.free(b for b in reversed(sequence.block_table) if b is not None)
        sequence.block_table.clear()
        chain = self._chains.pop(sequence, None)
        if chain is not None:
            # Also what the sequence released earlier, or had under blocks of others.
            self._touch(chain.node.path())

    def drop_cache(self) -> None:
        """Empties the prefix index; cached blocks become free."""
        for block_id in list(self._index):
            if block_id in self._index:
                self._forget(block_id)

    def check_integrity(self, sequences: list[Sequence]) -> None:
        """Proves that the blocks of all sequences, the cached and the free ones are the whole pool.

        Args:
            sequences: All sequences that have blocks; others may be among them.

        Raises:
            AssertionError: Names the block or sequence and the numbers that disagree.
        """
        self.allocator.check_integrity([s.block_table for s in sequences])
        differing = self.allocator.kept ^ set(self._index)
        assert not differing, f"blocks {sorted(differing)} are kept or in the index, not both"
        unknown = self._chains.keys() - set(sequences)
        assert not unknown, f"{_name(unknown.pop())} is unknown and has a place in the prefix index"
        for sequence in sequences:
            held = len(sequence.block_table) * self.block_size
            is_running = sequence.status is SequenceStatus.RUNNING
            assert not is_running or sequence.num_computed <= held, (
                f"{_name(sequence)} has {sequence.num_computed} computed tokens in {held} slots"
            )

    def _hits(self, sequence: Sequence) -> list[PrefixNode]:
        # Prompt log-probabilities need every prompt token's own hidden state, the first sampled
        # token that of the last one.
        if not self._prefix_cache or sequence.request.params.prompt_logprobs is not None:
            return []
        limit = (sequence.num_prompt - 1) // self.block_size
        return self._index.match(sequence.request.prompt_ids, _extra(sequence), limit=limit)

    def _num_outside(self, num_computed: int) -> int:
        """Leading blocks that no query from position `num_computed` on sees."""
        if self._window is None:
            return 0
        return max(0, num_computed - self._window + 1) // self.block_size

    def _admission_cost(self, sequence: Sequence, hits: list[PrefixNode]) -> int:
        """Free or cached blocks that admission takes: cached ones it hits are among them."""
        seen = _blocks(hits[self._num_outside(len(hits) * self.block_size) :])
        num_revived = sum(self.allocator.ref_count(block_id) == 0 for block_id in seen)
        return self._missing_at_admission(sequence) - len(hits) + num_revived

    def _restoration_cost(self, sequence: Sequence) -> int:
        num_outside = self._num_outside(sequence.num_computed)
        return self._missing_at_admission(sequence) - num_outside

    def _missing_at_admission(self, sequence: Sequence) -> int:
        return self.missing_blocks(sequence, max(sequence.num_tokens, self._reserved_tokens))

    def _fits_beside_watermark(self, count: int) -> bool:
        spare = self._watermark_blocks if self.allocator.num_used else 0
        return count + spare <= self.allocator.num_free

    def _check_free(self, count: int) -> None:
        if count > self.allocator.num_free:
            raise OutOfBlocks(f"{count} blocks asked for, {self.allocator.num_free} are free")

    def _owns_block_of(self, sequence: Sequence, start: int, stop: int) -> bool:
        """Whether the tokens lie in one block that is there and is the sequence's alone.

        The common case of a decode, found out at once: it is asked for every lane of every step.
        """
        table = sequence.block_table
        index = start // self.block_size
        if stop > (index + 1) * self.block_size or index >= len(table):
            return False
        block_id = table[index]
        return block_id is not None and self.allocator.ref_count(block_id) == 1

    def _shared_indices(self, sequence: Sequence, start: int, stop: int) -> list[int]:
        """Entries of the block table that hold the tokens and that other tables contain too."""
        table = sequence.block_table
        last = min(len(table), blocks_for(stop, self.block_size))
        shared: list[int] = []
        for index in range(start // self.block_size, last):
            block_id = table[index]
            assert block_id is not None, f"{_name(sequence)} writes to a block that it gave back"
            if self.allocator.ref_count(block_id) > 1:
                shared.append(index)
        return shared

    def _insert(
        self, parent: PrefixNode, tokens: Tokens, block_id: int | None
    ) -> PrefixNode | None:
        if block_id is None:
            return None
        self.allocator.keep(block_id)
        return self._index.insert(parent, tokens, block_id)

    def _touch(self, nodes: Iterable[PrefixNode]) -> None:
        """Makes a chain, given from its end, the last to be evicted, its beginning last of all."""
        for node in nodes:
            if node.block_id is not None:
                self.allocator.touch(node.block_id)

    def _evict(self, block_id: int) -> None:
        self.num_evictions += self._forget(block_id)

    def _forget(self, block_id: int) -> int:
        """How many blocks left the prefix index."""
        forgotten = self._index.forget(block_id)
        for dropped in forgotten:
            self.allocator.drop(dropped)
        return len(forgotten)


def _extra(sequence: Sequence) -> tuple[int, ...]:
    """What besides its tokens a sequence's keys and values depend on."""
    return (sequence.adapter,)


def _blocks(nodes: list[PrefixNode]) -> list[int]:
    return [node.block_id for node in nodes if node.block_id is not None]


def _name(sequence: Sequence) -> str:
    return f"sample {sequence.sample} of request {sequence.request.request_id}"
