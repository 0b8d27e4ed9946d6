"""Offline LLM batch inference over Parquet, on JAX, with a paged KV cache.

The public names load on first use, so that importing the package loads neither jax nor flax.
"""

import importlib
from typing import TYPE_CHECKING

from jaxpaged._version import VERSION as __version__

if TYPE_CHECKING:
    from jaxpaged.config import EngineConfig
    from jaxpaged.engine import Engine
    from jaxpaged.job.runner import run_job
    from jaxpaged.job.spec import JobSpec
    from jaxpaged.request import Completion, Request, SamplingParams

__all__ = [
    "Completion",
    "Engine",
    "EngineConfig",
    "JobSpec",
    "Request",
    "SamplingParams",
    "__version__",
    "run_job",
]

_HOME = {
    "Completion": "jaxpaged.request",
    "Engine": "jaxpaged.engine",
    "EngineConfig": "jaxpaged.config",
    "JobSpec": "jaxpaged.job.spec",
    "Request": "jaxpaged.request",
    "SamplingParams": "jaxpaged.request",
    "run_job": "jaxpaged.job.runner",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
