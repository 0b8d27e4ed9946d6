"""Gives sequences the blocks their tokens need, and takes them back.

Knows nothing of scheduling policy or of arrays.
"""

from jaxpaged.cache.block_allocator import BlockAllocator
from jaxpaged.cache.capacity import blocks_for
from jaxpaged.sequence import Sequence


class BlockManager:
    """Block tables over one pool: the only writer of `Sequence.block_table`."""

    def __init__(self, num_blocks: int, block_size: int, *, watermark: float = 0.0) -> None:
        self.block_size = block_size
        self.allocator = BlockAllocator(num_blocks)
        self._watermark_blocks = int(watermark * num_blocks)

    def missing_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks the sequence still lacks to hold its first `num_tokens` tokens."""
        return max(0, blocks_for(num_tokens, self.block_size) - len(sequence.block_table))

    def can_hold(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether enough blocks are free to hold the first `num_tokens` tokens."""
        return self.missing_blocks(sequence, num_tokens) <= self.allocator.num_free

    def can_admit(self, sequence: Sequence) -> bool:
        """Whether all known tokens of a waiting sequence fit with the watermark left free.

        With no block in use the watermark does not count: what fits alone must be able to run.
        """
        spare = self._watermark_blocks if self.allocator.num_used else 0
        missing = self.missing_blocks(sequence, sequence.num_tokens)
        return missing + spare <= self.allocator.num_free

    def allocate(self, sequence: Sequence, num_tokens: int) -> None:
        """Extends the block table so that it holds the first `num_tokens` tokens.

        Raises:
            OutOfBlocks: Too few blocks are free; the table is unchanged.
        """
        missing = self.missing_blocks(sequence, num_tokens)
        sequence.block_table.extend(self.allocator.allocate(missing))

    def free(self, sequence: Sequence) -> None:
        """Gives back all blocks of the sequence, the last ones first in line for reuse."""
        self.allocator.free(sequence.block_table[::-1])
        sequence.block_table.clear()

    def check_integrity(self, sequences: list[Sequence]) -> None:
        """Proves that the blocks of all sequences and the free ones are the whole pool.

        Raises:
            AssertionError: Names the block or sequence and the numbers that disagree.
        """
        self.allocator.check_integrity([s.block_table for s in sequences])
        for sequence in sequences:
            held = len(sequence.block_table) * self.block_size
            assert sequence.num_computed <= held, (
                f"sequence {sequence.request.request_id} has {sequence.num_computed} computed "
                f"tokens in {held} slots"
            )
