"""What one step computes: the frozen border between the scheduler and the model."""

import dataclasses

from jaxpaged.sequence import Sequence


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The tokens `[start, start + length)` of one sequence, computed in one step.

        token_ids  |-- computed --|---- chunk ----|-- later steps --|
                   0            start       start + length     num_tokens

    Attributes:
        sequence: Whose tokens; its block table already covers the chunk.
        start: Position of the first token.
        length: Number of tokens, at least 1.
        samples: The chunk reaches the sequence's last token, so the step samples the next one.
    """

    sequence: Sequence
    start: int
    length: int
    samples: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """All chunks of one step.

    Attributes:
        decodes: Chunks of a single token, in the order of admission.
        prefills: Chunks of several tokens, in the order of admission.
        preempted: Sequences whose blocks were taken away for this step.
    """

    decodes: tuple[Chunk, ...]
    prefills: tuple[Chunk, ...]
    preempted: tuple[Sequence, ...] = ()

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """Decodes, then prefills."""
        return self.decodes + self.prefills

    @property
    def num_tokens(self) -> int:
        """Tokens the step computes."""
        return len(self.decodes) + sum(chunk.length for chunk in self.prefills)

    @property
    def is_empty(self) -> bool:
        """Nothing to compute."""
        return not self.decodes and not self.prefills
