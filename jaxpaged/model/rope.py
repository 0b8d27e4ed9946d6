"""Frequencies of the rotary position embedding, by each kind's own formula. NumPy only."""

import math
from typing import NamedTuple

import numpy as np

from jaxpaged.model.config import ModelConfig
from jaxpaged.model.config_rope import RopeScaling


class Rope(NamedTuple):
    """How some layers rotate."""

    frequencies: np.ndarray
    """Radians per position of each rotated pair of a head, float32."""
    scale: float
    """What rotated queries and keys are multiplied by."""


def kinds(config: ModelConfig) -> tuple[tuple[Rope, ...], tuple[int, ...]]:
    """The ways in which a model's layers rotate, and of every layer, which of them."""
    wanted = [_kind(config, layer) for layer in range(config.num_layers)]
    ropes = {"usual": _usual, "local": _local, "none": _none}
    names = [name for name in ropes if name in wanted]
    return tuple(ropes[name](config) for name in names), tuple(map(names.index, wanted))


def inverse_frequencies(config: ModelConfig) -> np.ndarray:
    """Radians per position of each rotated pair of a head: float32, `[rotary_width / 2]`.

    `theta ** (-2 i / rotary_width)` for pair `i` (arXiv:2104.09864), stretched as the config says.
    """
    width, scaling = config.rotary_width, config.rope_scaling
    plain = _plain(config.rope_theta, width)
    if scaling is None:
        return plain
    if scaling.rope_type == "linear":
        return plain / np.float32(scaling.factor)
    if scaling.rope_type == "dynamic":
        return _plain(_dynamic_theta(config, scaling), width)
    if scaling.rope_type == "yarn":
        return _yarn(config, plain, scaling)
    if scaling.rope_type == "longrope":
        return _longrope(config, plain, scaling)
    return _llama3(plain, scaling)


def _kind(config: ModelConfig, layer: int) -> str:
    if not config.rotates(layer):
        return "none"
    is_local = config.local_rope_theta is not None and config.windows[layer] is not None
    return "local" if is_local else "usual"


def _usual(config: ModelConfig) -> Rope:
    scaling = config.rope_scaling
    return Rope(inverse_frequencies(config), scaling.attention_factor if scaling else 1.0)


def _local(config: ModelConfig) -> Rope:
    assert config.local_rope_theta is not None
    return Rope(_plain(config.local_rope_theta, config.rotary_width), 1.0)


def _none(config: ModelConfig) -> Rope:
    """Turns by nothing: all cosines are 1 and all sines 0, which changes no number."""
    return Rope(np.zeros(config.rotary_width // 2, np.float32), 1.0)


def _plain(theta: float, width: int) -> np.ndarray:
    exponents = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    return (1.0 / np.float32(theta) ** exponents).astype(np.float32)


def _dynamic_theta(config: ModelConfig, scaling: RopeScaling) -> float:
    """The base with which the lowest frequency is divided by the stretch and the highest kept.

    The stretch is `factor` times what the longest sequence has too much, and 1 up to the length
    that the model was trained for.
    """
    trained, width = config.max_position_embeddings, config.rotary_width
    length = max(config.rope_length or trained, trained)
    stretch = scaling.factor * length / trained - (scaling.factor - 1.0)
    return config.rope_theta * stretch ** (width / (width - 2)) if width > 2 else config.rope_theta


def _llama3(plain: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Llama 3.1's stretch: long waves slowed by `factor`, short ones kept, a blend between.

    With `r = original context / wavelength`, the share of the plain frequency rises linearly
    from 0 at `r = low_freq_factor` to 1 at `r = high_freq_factor`.
    """
    turns = scaling.original_max_position_embeddings * plain / (2 * np.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = np.clip((turns - scaling.low_freq_factor) / span, 0.0, 1.0)
    return (kept * plain + (1 - kept) * plain / scaling.factor).astype(np.float32)


def _yarn(config: ModelConfig, plain: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """YaRN (arXiv:2309.00071): frequencies that turn often are kept, those that turn seldom are
    divided by `factor`, and between the pairs where that is so the share changes linearly."""
    width = config.rotary_width

    def pair_that_turns(times: float) -> float:
        ratio = scaling.original_max_position_embeddings / (times * 2 * math.pi)
        return width * math.log(ratio) / (2 * math.log(config.rope_theta))

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.is_truncated:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    span = last - first or 0.001
    divided = np.clip((np.arange(width // 2, dtype=np.float32) - first) / span, 0.0, 1.0)
    return (plain / scaling.factor * divided + plain * (1 - divided)).astype(np.float32)


def _longrope(config: ModelConfig, plain: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """LongRoPE (arXiv:2402.13753): each frequency divided by its own factor, of one list or the
    other for all sequences."""
    length = config.rope_length or config.max_position_embeddings
    is_long = length > scaling.original_max_position_embeddings
    factors = scaling.long_factors if is_long else scaling.short_factors
    return (plain / np.asarray(factors, np.float32)).astype(np.float32)
