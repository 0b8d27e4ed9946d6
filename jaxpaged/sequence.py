"""One sample in progress. The engine and the scheduler change it; the rest of it is derived.

Knows nothing of text, files or arrays.
"""

import array
import dataclasses
import enum
import functools

from jaxpaged.request import Request

token_array = functools.partial(array.array, "i")
"""Makes an array of token ids. Not a list: the garbage collector would walk all tokens of all
sequences again and again."""


class SequenceStatus(enum.Enum):
    """Where a sequence is in its life."""

    WAITING = enum.auto()
    """Not admitted yet, or preempted for recompute: holds no blocks."""
    RUNNING = enum.auto()
    """Holds blocks and a lane, and takes part in steps."""
    SWAPPED = enum.auto()
    """Preempted, its keys and values in host memory: holds no blocks of the pool."""
    FINISHED = enum.auto()
    """Done: holds no blocks."""


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """The mutable record of one sample of a request.

    Attributes:
        request: What was asked for.
        sample: Which sample of the request.
        max_tokens: Most tokens to generate, with every limit already applied.
        limit_reason: Which limit `max_tokens` comes from.
        stop_ids: Tokens that end the sequence; `min_tokens` bans them at first.
        key: Two 32-bit words that key the random numbers of this sequence.
        bad_word_ids: Token sequences that must not be sampled.
        adapter: The number of the adapter that completes it; 0 for none.
        is_held: The next token is chosen on the host (a beam): after a step that samples, the
            sequence rests until its token is appended.
        token_ids: Prompt and sampled tokens the host knows.
        num_pending: Tokens that a dispatched step samples and the host does not know yet.
        num_computed: Leading tokens whose keys and values are in the pool once all dispatched
            steps have run: the only progress counter. Recompute sets it to 0.
        num_cached: Leading prompt tokens that came from the prefix cache when first admitted.
        block_table: Pool block of each logical block; None where the block lies outside every
            attention window and was given back.
        lane: The row of the device's lane state while running.
        rank: Seniority: lower ones run first and are preempted last. A request's samples share it.
        forks: Samples of the same request that wait for this one's prompt to be computed.
    """

    request: Request
    sample: int = 0
    max_tokens: int
    limit_reason: str = "max_tokens"
    stop_ids: tuple[int, ...] = ()
    key: tuple[int, int] = (0, 0)
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    adapter: int = 0
    is_held: bool = False
    token_ids: "array.array[int]" = dataclasses.field(default_factory=token_array)
    num_pending: int = 0
    num_computed: int = 0
    num_cached: int = 0
    block_table: list[int | None] = dataclasses.field(default_factory=list)
    lane: int | None = None
    rank: int = 0
    forks: list["Sequence"] = dataclasses.field(default_factory=list)
    status: SequenceStatus = SequenceStatus.WAITING

    def __post_init__(self) -> None:
        self.token_ids.extend(self.request.prompt_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and sampled tokens, those in flight included."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_prompt(self) -> int:
        """Prompt tokens."""
        return len(self.request.prompt_ids)

    @property
    def num_sampled(self) -> int:
        """Sampled tokens, those in flight included; also the place of the next one."""
        return self.num_tokens - self.num_prompt

    @property
    def num_output(self) -> int:
        """Sampled tokens the host knows."""
        return len(self.token_ids) - self.num_prompt

    @property
    def num_left(self) -> int:
        """Tokens that are there, or in flight, and not computed."""
        return self.num_tokens - self.num_computed

    @property
    def output_ids(self) -> "array.array[int]":
        """Sampled tokens the host knows."""
        return self.token_ids[self.num_prompt :]
