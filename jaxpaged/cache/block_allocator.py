"""Which blocks of the pool are free and how many block tables hold each of the others.

Knows nothing of sequences or of what the blocks contain.
"""

import collections

from jaxpaged.errors import OutOfBlocks


class BlockAllocator:
    """A free queue and a reference count per block.

    Invariant: a block is in the free queue exactly when its reference count is zero.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = collections.deque(range(num_blocks))
        self._ref_counts = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks in the free queue."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks with a reference count above zero."""
        return self.num_blocks - len(self._free)

    def ref_count(self, block_id: int) -> int:
        """How many block tables contain the block."""
        return self._ref_counts[block_id]

    def allocate(self, count: int) -> list[int]:
        """Block ids taken from the front of the free queue, each with reference count one.

        Raises:
            OutOfBlocks: Fewer than `count` blocks are free; nothing was taken.
        """
        if count > len(self._free):
            raise OutOfBlocks(f"{count} blocks asked for, {len(self._free)} are free")
        taken = [self._free.popleft() for _ in range(count)]
        for block_id in taken:
            self._ref_counts[block_id] = 1
        return taken

    def fork(self, block_ids: list[int]) -> None:
        """Raises the reference count of blocks that a second table now contains."""
        for block_id in block_ids:
            assert self._ref_counts[block_id] > 0, f"block {block_id} is free, it cannot be shared"
            self._ref_counts[block_id] += 1

    def free(self, block_ids: list[int]) -> None:
        """Lowers the reference counts; blocks that reach zero join the end of the free queue."""
        for block_id in block_ids:
            assert self._ref_counts[block_id] > 0, f"block {block_id} is freed twice"
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._free.append(block_id)

    def check_integrity(self, tables: list[list[int]]) -> None:
        """Proves that free and held blocks are the whole pool and every count is right.

        Args:
            tables: All block tables that exist.

        Raises:
            AssertionError: Names the block and the numbers that disagree.
        """
        held = collections.Counter(block_id for table in tables for block_id in table)
        free = set(self._free)
        assert len(free) == len(self._free), "a block is in the free queue twice"
        for block_id, count in enumerate(self._ref_counts):
            assert count == held[block_id], (
                f"block {block_id} has reference count {count}, {held[block_id]} tables contain it"
            )
            assert (block_id in free) == (count == 0), (
                f"block {block_id} has reference count {count} and is "
                f"{'' if block_id in free else 'not '}in the free queue"
            )
