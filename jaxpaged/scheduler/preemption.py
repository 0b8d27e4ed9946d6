"""What becomes of a preempted sequence's keys and values: dropped, or saved in host memory.

Recompute costs the time of computing the tokens again; swapping costs moving their bytes twice.
"""

from typing import Protocol, runtime_checkable

from jaxpaged.config import Preemption
from jaxpaged.sequence import Sequence


@runtime_checkable
class SwapPolicy(Protocol):
    """Decides for each preempted sequence."""

    def takes(self, sequence: Sequence) -> bool:
        """Whether the sequence is swapped; it counts as swapped from then on."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """The sequence's blocks are back in the pool, or not needed any more."""
        ...


class RecomputeAlways:
    """Nothing is swapped."""

    def takes(self, sequence: Sequence) -> bool:
        """Never."""
        return False

    def forget(self, sequence: Sequence) -> None:
        """Nothing to forget."""


class SwapSpace:
    """Swaps what is cheaper to move than to compute again, while host memory lasts.

    Args:
        max_blocks: Most blocks in host memory.
        block_bytes: Bytes of a block.
        preemption: "swap" swaps whatever fits, "auto" what is cheaper.

    Attributes:
        token_seconds: Time to compute a token again; the engine keeps it up to date.
        bytes_per_second: Speed of moving blocks.
    """

    def __init__(self, *, max_blocks: int, block_bytes: int, preemption: Preemption) -> None:
        self._max_blocks = max_blocks
        self._block_bytes = block_bytes
        self._preemption = preemption
        self._held: dict[Sequence, int] = {}
        self.token_seconds = 1e-3
        self.bytes_per_second = 2e9

    @property
    def num_blocks(self) -> int:
        """Blocks in host memory."""
        return sum(self._held.values())

    def takes(self, sequence: Sequence) -> bool:
        """Whether there is room and, if that decides, moving is cheaper."""
        count = sum(block is not None for block in sequence.block_table)
        if self.num_blocks + count > self._max_blocks:
            return False
        moving = 2 * count * self._block_bytes / self.bytes_per_second
        computing = sequence.num_computed * self.token_seconds
        if self._preemption == "auto" and moving > computing:
            return False
        self._held[sequence] = count
        return True

    def forget(self, sequence: Sequence) -> None:
        """Gives the sequence's room back."""
        self._held.pop(sequence, None)
