"""Lanes for tests of the sampler, and in plain NumPy what the sampler has to do."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged import SamplingParams
from jaxpaged.engine import lane_params, sampling
from jaxpaged.engine.admission import random_key
from jaxpaged.engine.lane_params import LaneParams
from jaxpaged.engine.sampling import Sampled

CONTEXT = 40
"""Tokens of a history."""

_sample = jax.jit(sampling.sample)


def row(
    params: SamplingParams,
    *,
    seed: int = 0,
    num_prompt: int = 0,
    stop_ids: tuple[int, ...] = (),
    bad_word_ids: tuple[tuple[int, ...], ...] = (),
    vocab: int,
) -> LaneParams:
    """The rows of one lane."""
    return lane_params.lane_params(
        params,
        key=random_key(seed, 0),
        num_prompt=num_prompt,
        stop_ids=stop_ids,
        bad_word_ids=bad_word_ids,
        vocab_size=vocab,
    )


def stack(rows: list[LaneParams]) -> LaneParams:
    """Lanes out of their rows."""
    return LaneParams(*(np.stack(parts) for parts in zip(*rows, strict=True)))


def lanes(num: int, *, vocab: int, **params) -> LaneParams:
    """Lanes that differ in their keys only."""
    same = row(SamplingParams(**params), vocab=vocab)
    lanes = LaneParams(*(np.repeat(part[None], num, axis=0) for part in same))
    return lanes._replace(keys=np.array([random_key(seed, 0) for seed in range(num)], np.uint32))


def sample(x: np.ndarray, params: LaneParams, history=None, num_tokens=0) -> Sampled:
    """What the compiled sampler gives, as NumPy arrays.

    Lanes are padded as those of a step are, which also spares compilations.
    """
    num, vocab = x.shape
    padding = -num % 64
    history = np.zeros((num, CONTEXT), np.int32) if history is None else history
    counts = np.broadcast_to(np.asarray(num_tokens, np.int32), (num,))
    params = LaneParams(*map(_joined, params, lane_params.empty(padding, vocab)))
    sampled = _sample(
        _joined(x, np.zeros((padding, vocab), np.float32)),
        params,
        _joined(history, np.zeros((padding, CONTEXT), np.int32)),
        _joined(counts, np.zeros(padding, np.int32)),
    )
    return Sampled(*(np.asarray(part)[:num] for part in sampled))


def logits(num: int, vocab: int, seed: int = 0) -> np.ndarray:
    """Normally distributed logits."""
    return (np.random.default_rng(seed).standard_normal((num, vocab)) * 2).astype(np.float32)


def probabilities(x: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The distribution a lane draws from, by its definition: sorts in double precision."""
    left = x.astype(np.float64) / params.temperature
    order = np.argsort(-left, kind="stable")
    if params.top_k > 0:
        left[order[params.top_k :]] = -np.inf
    if params.top_p < 1:
        share = _softmax(left)[order]
        left[order[np.cumsum(share) - share >= params.top_p]] = -np.inf
    left[_softmax(left) < params.min_p * _softmax(left).max()] = -np.inf
    if params.typical_p < 1:
        p = _softmax(left)
        surprise = np.where(p > 0, -np.log(np.where(p > 0, p, 1)), np.inf)
        entropy = np.sum(p[p > 0] * surprise[p > 0])
        order = np.argsort(np.abs(surprise - entropy), kind="stable")
        share = p[order]
        left[order[np.cumsum(share) - share >= params.typical_p]] = -np.inf
    return _softmax(left)


def _softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def _joined(x: np.ndarray, more: np.ndarray) -> jax.Array:
    return jnp.asarray(np.concatenate([x, more]))
