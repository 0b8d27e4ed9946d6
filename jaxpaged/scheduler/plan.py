"""What one step computes: the frozen border between the scheduler and the model."""

import dataclasses
from typing import NamedTuple

from jaxpaged.sequence import Sequence


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The tokens `[start, start + length)` of one sequence, computed in one step.

        token_ids  |-- computed --|---- chunk ----|-- later steps --|
                   0            start       start + length     num_tokens

    Attributes:
        sequence: Whose tokens; its block table already covers the chunk.
        lane: The sequence's lane in this step.
        start: Position of the first token.
        length: Number of tokens, at least 1.
        samplers: Sequences whose next token is sampled behind the chunk's last one, each by its
            own parameters: the sequence itself if the chunk reaches its last token, and at the
            end of a prompt the samples that fork from it.
    """

    sequence: Sequence
    lane: int
    start: int
    length: int
    samplers: tuple["Sampler", ...] = ()

    @property
    def samples(self) -> bool:
        """Whether the step samples behind the chunk."""
        return bool(self.samplers)


class Sampler(NamedTuple):
    """A sequence whose next token a step samples."""

    sequence: Sequence
    lane: int


class TableUpdate(NamedTuple):
    """A block table's entry that changed since the lane was set."""

    lane: int
    place: int
    block_id: int


class BlockCopy(NamedTuple):
    """A block whose content is copied before the step, because a shared one is written to."""

    source: int
    target: int


class Swap(NamedTuple):
    """Blocks of a sequence that move between the pool and host memory, before the step."""

    sequence: Sequence
    block_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """All that one step does; the fields are listed in the order in which it is done.

    Attributes:
        swap_outs: Blocks to save in host memory.
        swap_ins: Blocks to fill from host memory.
        copies: Blocks to copy.
        admitted: Sequences that got a lane: all of the lane's state is set.
        table_updates: Changed entries of other lanes' block tables.
        chunks: What is computed: sequences of seniority order, at most one chunk each.
        preempted: Sequences whose blocks were taken away for this step.
    """

    swap_outs: tuple[Swap, ...] = ()
    swap_ins: tuple[Swap, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    admitted: tuple[Sequence, ...] = ()
    table_updates: tuple[TableUpdate, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    preempted: tuple[Sequence, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens the step computes."""
        return sum(chunk.length for chunk in self.chunks)

    @property
    def is_empty(self) -> bool:
        """Nothing to compute."""
        return not self.chunks
