"""Steps that are planned, laid out and counted, and not computed: a runner without a device.

Scheduler, block manager and engine above it do all they do in a real run. Every sampler gets the
same token, so that completions end at their limits and nowhere else.
"""

import collections.abc
import dataclasses

import numpy as np

from jaxpaged.engine import batch
from jaxpaged.engine.batch import BatchShapes
from jaxpaged.engine.limits import Limits
from jaxpaged.engine.runner import StepResult
from jaxpaged.engine.sampling import Sampled
from jaxpaged.model.llama import Llama
from jaxpaged.scheduler.plan import Sampler, StepPlan

TOKEN = 0
"""What every sampler gets."""

# What a warm-up compiles beside forward passes and samplers: scores, lanes, tables, and three that
# move blocks.
_OTHER_PROGRAMS = 6

_NOTHING = np.zeros(0, np.float32)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DryFlight:
    """A step of which only the plan exists.

    Attributes:
        plan: What it would do.
        num_padding: Token positions that would be computed only to fill the bucket.
        samplers: Who samples.
        is_starved: Never: there is no device that could wait.
    """

    plan: StepPlan
    num_padding: int
    samplers: tuple[Sampler, ...]
    is_starved: bool = False

    def result(self) -> StepResult:
        """The same token for everyone."""
        tokens = np.full(len(self.samplers), TOKEN, np.int32)
        sampled = Sampled(tokens, _NOTHING, np.zeros(0, np.int32), _NOTHING, _NOTHING)
        return StepResult(samplers=self.samplers, sampled=sampled, scores=())


class DryRunner:
    """Runs nothing.

    Attributes:
        shapes: The sizes of the batches, fitted to the prompts once there were some.
        compile_seconds: None were needed.
    """

    def __init__(self, shapes: BatchShapes) -> None:
        self.shapes = shapes
        self.compile_seconds = 0.0
        self._touched: set[int] = set()

    @classmethod
    def allocate(cls, model: Llama, limits: Limits) -> "DryRunner":
        """The runner of a model, which may be without weights."""
        return cls(limits.shapes)

    @property
    def touched_blocks(self) -> int:
        """Blocks of the pool that a step has written to, however long ago."""
        return len(self._touched)

    @property
    def num_executables(self) -> int:
        """Programs that a warm-up would compile."""
        return len(self.shapes.buckets()) + len(self.shapes.sample_buckets) + _OTHER_PROGRAMS

    def warm_up(
        self, prompts: collections.abc.Sequence[tuple[int, ...]], *, is_shared: bool
    ) -> None:
        """Fits the buckets to the prompts, as a real runner does."""
        self.shapes = batch.fit(self.shapes, prompts, is_shared=is_shared)

    def prepare(self, plan: StepPlan) -> None:
        """Nothing moves."""

    def dispatch(self, plan: StepPlan) -> DryFlight:
        """The step, laid out in its bucket."""
        layout = batch.lay_out(plan)
        size = self.shapes.block_size
        for chunk in plan.chunks:
            first, last = chunk.start // size, (chunk.start + chunk.length - 1) // size
            blocks = chunk.sequence.block_table[first : last + 1]
            self._touched.update(block for block in blocks if block is not None)
        return DryFlight(
            plan=plan,
            num_padding=self.shapes.bucket(layout).num_tokens - plan.num_tokens,
            samplers=tuple(sampler for sampler, _, _ in layout.samplers),
        )
