"""Runs requests: scheduler, model and text brought together."""

from jaxpaged.engine.engine import Engine
from jaxpaged.engine.stats import EngineStats

__all__ = ["Engine", "EngineStats"]
