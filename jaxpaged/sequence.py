"""One generation in progress. The engine and the scheduler change it; the rest of it is derived.

Knows nothing of text, files or arrays.
"""

import dataclasses
import enum

from jaxpaged.request import Request


class SequenceStatus(enum.Enum):
    """Where a sequence is in its life."""

    WAITING = enum.auto()
    """Not admitted yet, or preempted for recompute: holds no blocks."""
    RUNNING = enum.auto()
    """Holds blocks and takes part in steps."""
    FINISHED = enum.auto()
    """Done: holds no blocks."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Sequence:
    """The mutable record of one request.

    Attributes:
        request: What was asked for.
        max_tokens: Most tokens to generate, with every limit already applied.
        limit_reason: Which limit `max_tokens` comes from.
        stop_ids: Tokens that end the sequence; `min_tokens` bans them at first.
        key: Two 32-bit words that key the random numbers of this sequence.
        token_ids: Prompt and sampled tokens.
        num_computed: Leading tokens whose keys and values are in the pool: the only progress
            counter. Preemption sets it to 0.
        block_table: Pool block of each logical block.
    """

    request: Request
    max_tokens: int
    limit_reason: str = "max_tokens"
    stop_ids: tuple[int, ...] = ()
    key: tuple[int, int] = (0, 0)
    token_ids: list[int] = dataclasses.field(default_factory=list)
    num_computed: int = 0
    block_table: list[int] = dataclasses.field(default_factory=list)
    status: SequenceStatus = SequenceStatus.WAITING

    def __post_init__(self) -> None:
        self.token_ids.extend(self.request.prompt_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and sampled tokens."""
        return len(self.token_ids)

    @property
    def num_prompt(self) -> int:
        """Prompt tokens."""
        return len(self.request.prompt_ids)

    @property
    def num_sampled(self) -> int:
        """Sampled tokens; also the position of the next one in the completion."""
        return len(self.token_ids) - len(self.request.prompt_ids)

    @property
    def output_ids(self) -> list[int]:
        """Sampled tokens."""
        return self.token_ids[self.num_prompt :]
