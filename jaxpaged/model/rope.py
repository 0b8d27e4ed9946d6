"""Frequencies of the rotary position embedding, by each kind's own formula. NumPy only."""

import numpy as np

from jaxpaged.model.config import ModelConfig, RopeScaling


def inverse_frequencies(config: ModelConfig) -> np.ndarray:
    """Radians per position of each pair of a head: float32, `[head_dim / 2]`.

    `theta ** (-2 i / head_dim)` for pair `i` (arXiv:2104.09864), stretched as the config says.
    """
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    plain = (1.0 / np.float32(config.rope_theta) ** exponents).astype(np.float32)
    scaling = config.rope_scaling
    if scaling is None:
        return plain
    if scaling.rope_type == "linear":
        return plain / np.float32(scaling.factor)
    return _llama3(plain, scaling)


def _llama3(plain: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Llama 3.1's stretch: long waves slowed by `factor`, short ones kept, a blend between.

    With `r = original context / wavelength`, the share of the plain frequency rises linearly
    from 0 at `r = low_freq_factor` to 1 at `r = high_freq_factor`.
    """
    turns = scaling.original_max_position_embeddings * plain / (2 * np.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = np.clip((turns - scaling.low_freq_factor) / span, 0.0, 1.0)
    return (kept * plain + (1 - kept) * plain / scaling.factor).astype(np.float32)
