"""Decides what each step computes. Plain Python, no arrays."""

from jaxpaged.scheduler.plan import Chunk, StepPlan
from jaxpaged.scheduler.scheduler import Scheduler, Usage

__all__ = ["Chunk", "Scheduler", "StepPlan", "Usage"]
