"""Decides what each step computes. Plain Python, no arrays."""

from jaxpaged.scheduler.plan import Chunk, Sampler, StepPlan
from jaxpaged.scheduler.scheduler import Scheduler, Usage

__all__ = ["Chunk", "Sampler", "Scheduler", "StepPlan", "Usage"]
