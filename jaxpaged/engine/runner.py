"""What the engine asks of whoever runs its steps, and what comes back."""

import collections.abc
import dataclasses
from typing import Protocol, runtime_checkable

from jaxpaged.engine.limits import Limits
from jaxpaged.engine.sampling import Sampled
from jaxpaged.model.llama import Llama
from jaxpaged.scheduler.plan import Sampler, StepPlan
from jaxpaged.sequence import Sequence


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScoredChunk:
    """Log-probabilities of a chunk's prompt tokens but a prompt's first.

    Attributes:
        sequence: Whose prompt.
        start: Position of the first token that is scored.
        sampled: Rows in the order of the tokens.
    """

    sequence: Sequence
    start: int
    sampled: Sampled


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step gave, on the host.

    Attributes:
        samplers: Who sampled.
        sampled: Row by row what they sampled; the token is `sampling.INVALID_TOKEN` where the
            logits were not finite.
        scores: Log-probabilities of prompt tokens.
    """

    samplers: tuple[Sampler, ...]
    sampled: Sampled
    scores: tuple[ScoredChunk, ...]


@runtime_checkable
class Flight(Protocol):
    """A step that was started."""

    @property
    def plan(self) -> StepPlan:
        """What it does."""
        ...

    @property
    def num_padding(self) -> int:
        """Token positions computed only to fill the bucket."""
        ...

    @property
    def is_starved(self) -> bool:
        """The device had run out of work by then."""
        ...

    @property
    def samplers(self) -> tuple[Sampler, ...]:
        """Who samples."""
        ...

    def result(self) -> StepResult:
        """What the step gave; waits for it."""
        ...


@runtime_checkable
class Runner(Protocol):
    """Runs step plans, one after the other."""

    compile_seconds: float

    @property
    def num_executables(self) -> int:
        """Compiled programs."""
        ...

    def warm_up(
        self, prompts: collections.abc.Sequence[tuple[int, ...]], *, is_shared: bool
    ) -> None:
        """Gets ready for requests with such prompts."""
        ...

    def prepare(self, plan: StepPlan) -> None:
        """Starts what comes before the step: moves blocks and sets lanes."""
        ...

    def dispatch(self, plan: StepPlan) -> Flight:
        """Starts a step that was prepared."""
        ...


RunnerMaker = collections.abc.Callable[[Llama, Limits], Runner]
"""Makes the runner of a model within the limits of an engine."""
