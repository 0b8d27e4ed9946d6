"""What the step gate compiles: every step that is vouched for, and two that are bad on purpose."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

from llama_shapes import LLAMA_1B, LLAMA_8B, MODELS

from jaxpaged.model.config import ModelConfig

LANES = 64
MIXED_TOKENS = 512
MAX_MODEL_LEN = 4096
BLOCK_SIZE = 16
CONTEXT = 1000
"""Live tokens of every lane in a decode step, where the pool holds as many."""
NUM_BLOCKS = 8192
SMALL_POOLS = {(LLAMA_8B, "rtx4090"): 2048}
"""Blocks of pools that would not fit beside the weights."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A step of a model.

    Attributes:
        name: Tells it from all others.
        config: The model.
        num_tokens: Bucket of the step.
        kind: A decode step has one token for each lane; a mixed one prefills too.
        layer_loop: How the engine goes through the layers.
        is_donated: The step may write into the pool that it is given.
    """

    name: str
    config: ModelConfig
    num_tokens: int
    kind: Literal["decode", "mixed"]
    layer_loop: Literal["scan", "unrolled"] = "unrolled"
    is_donated: bool = True


STEPS: Mapping[Literal["decode", "mixed"], int] = {"decode": LANES, "mixed": MIXED_TOKENS}
CASES = {
    f"{model}/{kind}": Case(name=f"{model}/{kind}", config=config, num_tokens=num_tokens, kind=kind)
    for model, config in MODELS.items()
    for kind, num_tokens in STEPS.items()
}
"""Every step that is vouched for."""
_SHORT = dataclasses.replace(LLAMA_1B, num_layers=4, windows=())
FAULTS = {
    case.name: case
    for case in (
        Case(
            name="fault/pool",
            config=_SHORT,
            num_tokens=LANES,
            kind="decode",
            is_donated=False,
        ),
        Case(
            name="fault/scan",
            config=_SHORT,
            num_tokens=LANES,
            kind="decode",
            layer_loop="scan",
        ),
    )
}
"""What the gate is tried on: a step that copies its pool, and one that copies its weights."""
