"""A model's configuration with another rotation than its files declare, for longer sequences.

The keys are those of `rope_parameters` in a `config.json`, and read by the same code. Knows nothing
of weights, which stay as they were trained.
"""

import dataclasses
import math
from collections.abc import Mapping

from jaxpaged.errors import CheckpointError, ConfigError
from jaxpaged.model.config import ModelConfig
from jaxpaged.model.config_families import FAMILIES
from jaxpaged.model.config_fields import Fields
from jaxpaged.model.config_rope import RopeScaling, read_rope

KEY = "engine.rope"

# Whose factor says how far from the context of the first training sequences reach.
_FROM_ORIGINAL = ("yarn", "llama3", "longrope")

# Where the length that a model declares is the stretched one.
_DECLARED_STRETCHED = ("linear", "llama3")


def stretched(config: ModelConfig, parameters: Mapping[str, object] | None) -> ModelConfig:
    """The configuration with the rotation that `parameters` declare in the place of its own.

    What they leave out of `rope_theta` and `partial_rotary_factor` stays as it is. In a model whose
    layers with a window rotate in another way, those stay as they are.

    Args:
        config: As the model's files declare it.
        parameters: The keys of `rope_parameters`; None changes nothing.

    Raises:
        ConfigError: A kind of rotation that is not known, or malformed or missing keys of it.
    """
    if parameters is None:
        return config
    values = {
        "max_position_embeddings": config.max_position_embeddings,
        "partial_rotary_factor": config.rotary_share,
        "rope_local_base_freq": config.local_rope_theta,
        "rope_parameters": {"rope_theta": config.rope_theta, **parameters},
    }
    # The shape is read from the configuration, whatever the family was.
    family = dataclasses.replace(
        FAMILIES["llama"],
        keys=frozenset({"partial_rotary_factor"}),
        has_local_rope=config.local_rope_theta is not None,
    )
    try:
        rope = read_rope(Fields(values=values, where=KEY), family, config.head_dim)
    except CheckpointError as error:
        # The object is one of the job's, and not of a file.
        message = str(error).replace(f"{KEY}: rope_parameters:", f"{KEY}:")
        raise ConfigError(message) from None
    return dataclasses.replace(
        config,
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        rotary_share=rope.share,
        longest=_reach(config, rope.scaling),
        own_longest=config.max_len,
    )


def check_length(length: int, config: ModelConfig) -> None:
    """Makes sure that a model's rotation reaches as far as its sequences.

    Raises:
        ConfigError: It does not; the message says which rotation would.
    """
    if length <= config.max_len:
        return
    raise ConfigError(
        f"engine.max_model_len is {length}, the model was made for at most {config.max_len} "
        f"tokens; use a smaller value{_advice(length, config)}"
    )


def _advice(length: int, config: ModelConfig) -> str:
    """How the rotation can be stretched, written as it belongs into the job file."""
    scaling = config.rope_scaling
    if scaling is not None and scaling.rope_type == "longrope":
        return ""
    wanted = _example(length, config)
    keys = ", ".join(f"{key}: {value}" for key, value in wanted.items())
    return (
        ", or stretch its rotation, which changes what it computes for every row: "
        f"{KEY}: {{{keys}}}"
    )


def _example(length: int, config: ModelConfig) -> dict[str, object]:
    scaling = config.rope_scaling
    if scaling is None:
        trained = config.max_position_embeddings
        return {
            "rope_type": "yarn",
            "factor": _factor(length, trained),
            "original_max_position_embeddings": trained,
        }
    example: dict[str, object] = {"rope_type": scaling.rope_type}
    if scaling.rope_type in _DECLARED_STRETCHED:
        # It takes the place of the model's own, which is in the declared length already.
        example["factor"] = _factor(length, config.max_position_embeddings, scaling.factor)
    elif scaling.rope_type == "dynamic":
        example["factor"] = _factor(length, config.max_position_embeddings)
    else:
        example["factor"] = _factor(length, scaling.original_max_position_embeddings)
    if scaling.rope_type not in _FROM_ORIGINAL:
        return example
    original = scaling.original_max_position_embeddings
    if scaling.rope_type == "llama3":
        example["low_freq_factor"] = scaling.low_freq_factor
        example["high_freq_factor"] = scaling.high_freq_factor
    example["original_max_position_embeddings"] = original
    return example


def _factor(length: int, trained: int, own: float = 1.0) -> float:
    """The stretch, in tenths, that takes to `length` tokens what `own` takes to `trained`."""
    return math.ceil(10 * own * length / trained) / 10


def _reach(config: ModelConfig, scaling: RopeScaling | None) -> int:
    """The longest sequence that a rotation is made for, in the place of the model's own."""
    own, trained = config.rope_scaling, config.max_position_embeddings
    if scaling is None:
        return trained
    if own is not None and own.rope_type in _DECLARED_STRETCHED:
        if scaling.rope_type in ("dynamic", *_DECLARED_STRETCHED):
            # Also less than before, where the model's own stretch was a larger one.
            return int(trained * scaling.factor / own.factor)
        trained = int(trained / own.factor)
    if scaling.rope_type in _FROM_ORIGINAL:
        reach = scaling.original_max_position_embeddings * scaling.factor
    else:
        reach = trained * scaling.factor
    return max(int(reach), trained)
