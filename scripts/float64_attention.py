"""Attention in float64 NumPy, and how far from it a right kernel may be."""

from typing import NamedTuple

import numpy as np

BFLOAT16_ROUNDING = 2**-8
"""Largest error of a number that is rounded to bfloat16, as a share of it."""
FLOAT32_ROUNDING = 3e-5
"""As a share of what is summed up: of scores of unit variance, summed in float32 over up to 256
products in any order, and of exponentials. Products in TF32 err by 2**-11 and are ten times off."""
LEAST = 1e-9
"""Tolerated where nothing is summed up but zeros."""


class Attended(NamedTuple):
    """What queries attend to, in float64."""

    result: np.ndarray
    """The weighted sums of values, `[T, H, D]`."""
    spread: np.ndarray
    """The same of the values' magnitudes: what errors of the weights are a share of."""


def attend(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    positions: np.ndarray,
    window: int,
    scale: float,
    soft_cap: float | None = None,
) -> Attended:
    """Causal attention of queries of one sequence.

    Args:
        q: Rotated queries, `[T, H, D]`.
        k: Keys of the sequence, `[C, K, D]`; those that no query sees may be NaN.
        v: Values, in the form of the keys.
        positions: Of each query in the sequence, `[T]`; it sees keys up to its own.
        window: How many of them, its own included.
        scale: Factor on the scores.
        soft_cap: Scores become `soft_cap * tanh(score / soft_cap)`.
    """
    num_tokens, _, head_dim = q.shape
    num_kv_heads = k.shape[1]
    before = positions[:, None] - np.arange(k.shape[0])[None, :]
    seen = (before >= 0) & (before < window)
    live = seen.any(axis=0)
    keys, values = (
        np.where(live[:, None, None], x.astype(np.float64), 0.0).transpose(1, 0, 2) for x in (k, v)
    )
    # Heads of a group one after the other, so that each key/value head is one product.
    grouped = q.astype(np.float64).reshape(num_tokens, num_kv_heads, -1, head_dim)
    rows = grouped.transpose(1, 2, 0, 3).reshape(num_kv_heads, -1, head_dim)
    scores = rows @ keys.transpose(0, 2, 1) * scale
    if soft_cap is not None:
        scores = soft_cap * np.tanh(scores / soft_cap)
    group = rows.shape[1] // num_tokens
    scores = np.where(np.tile(seen, (group, 1))[None], scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)

    def summed(x: np.ndarray) -> np.ndarray:
        heads = (weights @ x).reshape(num_kv_heads, group, num_tokens, head_dim)
        return heads.transpose(2, 0, 1, 3).reshape(q.shape)

    return Attended(summed(values), summed(np.abs(values)))


def tolerance(expected: Attended, query_dtype: str) -> np.ndarray:
    """Largest error of a right kernel, for each number of the result.

    Results and softmax weights of 16-bit queries are rounded to bfloat16 once each, the weights
    each by itself: so the error is at most that share of the result and of the spread. All else,
    and everything of float32 queries, is float32; products of 16-bit numbers are exact in it.
    """
    rounding = FLOAT32_ROUNDING * expected.spread + LEAST
    if query_dtype != "float32":
        rounding += BFLOAT16_ROUNDING * (np.abs(expected.result) + expected.spread)
    return rounding


def error_share(got: np.ndarray, expected: Attended, query_dtype: str) -> float:
    """The largest error as a share of what is tolerated; infinite if a number is not finite."""
    if not np.isfinite(got).all():
        return float("inf")
    error = np.abs(got.astype(np.float64) - expected.result)
    return float((error / tolerance(expected, query_dtype)).max())
