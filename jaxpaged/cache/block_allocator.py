"""Which blocks of the pool are free, held or cached, and how many block tables hold each.

    free queue  --allocate-->  held  --free, not kept-->  free queue
                               held  --free, kept------>  cached      (still in the prefix index)
                               held  <--share-----------  cached
    free queue  <--drop-----------------------------------cached      (evicted, or forgotten)

Knows nothing of sequences or of what the blocks contain.
"""

import collections
from collections.abc import Callable, Iterable, Sequence

from jaxpaged.errors import OutOfBlocks


class BlockAllocator:
    """A free queue, a reference count per block, and the kept blocks nobody holds, oldest first.

    Invariant: a block with reference count zero is either in the free queue or, if it is kept,
    among the cached ones; a block with a higher count is in neither.

    Args:
        num_blocks: Blocks of the pool.
        on_evict: Called with the cached block whose space is needed; it must `drop` at least that
            one.
    """

    def __init__(self, num_blocks: int, *, on_evict: Callable[[int], None] | None = None) -> None:
        self.num_blocks = num_blocks
        self._on_evict = on_evict or self.drop
        self._free = collections.deque(range(num_blocks))
        self._ref_counts = [0] * num_blocks
        self._kept: set[int] = set()
        # In the order of eviction. An ordinary dict would search its first entry through the
        # holes that earlier evictions left.
        self._cached: collections.OrderedDict[int, None] = collections.OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated: those of the free queue and the cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Kept blocks that no table contains."""
        return len(self._cached)

    @property
    def kept(self) -> frozenset[int]:
        """Marked blocks, held or cached."""
        return frozenset(self._kept)

    @property
    def num_used(self) -> int:
        """Blocks with a reference count above zero."""
        return self.num_blocks - self.num_free

    def ref_count(self, block_id: int) -> int:
        """How many block tables contain the block."""
        return self._ref_counts[block_id]

    def allocate(self, count: int) -> list[int]:
        """Block ids, each with reference count one: free ones first, then the oldest cached ones.

        Raises:
            OutOfBlocks: Fewer than `count` blocks are free or cached; nothing was taken.
        """
        if count > self.num_free:
            raise OutOfBlocks(f"{count} blocks asked for, {self.num_free} are free")
        while len(self._free) < count:
            self._on_evict(next(iter(self._cached)))
        taken = [self._free.popleft() for _ in range(count)]
        for block_id in taken:
            self._ref_counts[block_id] = 1
        return taken

    def share(self, block_ids: Iterable[int]) -> None:
        """Raises the reference counts of held or cached blocks that one more table contains."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                assert block_id in self._cached, f"block {block_id} is free, it cannot be shared"
                del self._cached[block_id]
            self._ref_counts[block_id] += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """Lowers the reference counts, in the order given.

        Blocks that reach zero join the end of the free queue or, if kept, of the cached ones.
        """
        for block_id in block_ids:
            assert self._ref_counts[block_id] > 0, f"block {block_id} is freed twice"
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] > 0:
                continue
            if block_id in self._kept:
                self._cached[block_id] = None
            else:
                self._free.append(block_id)

    def keep(self, block_id: int) -> None:
        """Marks a held block: when the last table lets go it becomes cached instead of free."""
        assert self._ref_counts[block_id] > 0, f"block {block_id} is free, it cannot be kept"
        self._kept.add(block_id)

    def drop(self, block_id: int) -> None:
        """Takes the mark away; a cached block becomes free."""
        self._kept.discard(block_id)
        if block_id in self._cached:
            del self._cached[block_id]
            self._free.append(block_id)

    def touch(self, block_id: int) -> None:
        """Puts a block, if it is cached, last in the order of eviction."""
        if block_id in self._cached:
            self._cached.move_to_end(block_id)

    def check_integrity(self, tables: Iterable[Sequence[int | None]]) -> None:
        """Proves that free, cached and held blocks are the whole pool and every count is right.

        Args:
            tables: All block tables that exist.

        Raises:
            AssertionError: Names the block and the numbers that disagree.
        """
        held = collections.Counter(b for table in tables for b in table if b is not None)
        free = set(self._free)
        assert len(free) == len(self._free), "a block is in the free queue twice"
        for block_id, count in enumerate(self._ref_counts):
            assert count == held[block_id], (
                f"block {block_id} has reference count {count}, {held[block_id]} tables contain it"
            )
            is_kept = block_id in self._kept
            self._check_place(block_id, "free queue", block_id in free, count == 0 and not is_kept)
            self._check_place(block_id, "cache", block_id in self._cached, count == 0 and is_kept)

    def _check_place(self, block_id: int, place: str, is_there: bool, should_be: bool) -> None:
        assert is_there == should_be, (
            f"block {block_id} has reference count {self._ref_counts[block_id]}, is "
            f"{'' if block_id in self._kept else 'not '}kept, and is "
            f"{'' if is_there else 'not '}in the {place}"
        )
