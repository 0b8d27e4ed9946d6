"""What a job asks of an engine; `jaxpaged.engine.Engine` gives it, and so does a test's double."""

from typing import Any, ClassVar, Protocol, runtime_checkable

from jaxpaged.histogram import Histogram
from jaxpaged.job.prompt.prompt_tokenizer import PromptTokenizer
from jaxpaged.request import Completion, Request


@runtime_checkable
class LiveStats(Protocol):
    """The counters a progress display and a report read; see `jaxpaged.engine.stats`.

    A dataclass: the report takes every field it has. Another thread may read them while the
    engine works: each is right, if not all of the same step.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    device: str
    dtype: str
    weight_dtype: str
    kv_dtype: str
    implementation: str
    num_blocks: int
    steps: int
    running: int
    waiting: int
    swapped: int
    used_blocks: int
    prefill_tokens: int
    decode_tokens: int
    sampled_tokens: int
    padding_tokens: int
    live_slot_steps: int
    prompt_tokens: int
    cached_tokens: int
    evictions: int
    copied_blocks: int
    recomputes: int
    swaps: int
    starved_steps: int
    executables: int
    prefill_seconds: float
    decode_seconds: float
    prefill_times: Histogram
    decode_times: Histogram
    host_seconds: float
    compile_seconds: float


@runtime_checkable
class CompletionEngine(Protocol):
    """Takes requests at any time and gives what they come to, in any order.

    A request with `n` samples gives `n` completions, in the order of its samples and all in the
    same step; one that cannot be completed gives one, with an error.
    """

    @property
    def tokenizer(self) -> PromptTokenizer:
        """The model's tokenizer."""
        ...

    @property
    def description(self) -> str:
        """One line about the pool."""
        ...

    @property
    def stats(self) -> LiveStats:
        """Live counters."""
        ...

    def add_request(self, request: Request) -> None:
        """Takes a request; a fault of it comes back as a completion."""
        ...

    def warm_up(self) -> None:
        """Prepares for requests like those that wait."""
        ...

    def has_work(self) -> bool:
        """Whether a step would do anything."""
        ...

    def step(self) -> list[Completion]:
        """Runs one step; returns what it finished."""
        ...

    def num_unfinished(self) -> int:
        """Requests taken and not yet returned."""
        ...

    def abort(self) -> list[int]:
        """Drops everything unfinished; returns the request ids."""
        ...

    def check_integrity(self) -> None:
        """Raises AssertionError if blocks are lost or held twice; cheap."""
        ...
