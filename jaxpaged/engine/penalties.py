"""What a row's parameters change on the logits before a token is chosen from them.

In this order: `logit_bias`; the bans of `bad_words` and, as biases of -inf, of `min_tokens`; the
repetition penalty, over prompt and completion; frequency and presence penalty, over the
completion. Everything is skipped unless a lane wants it, and changes no bit of those that do not.
"""

import functools
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxpaged.engine.lane_params import LaneParams
from jaxpaged.shapes import AnyArray

# Penalties must not turn a finite logit into an infinite one.
_LARGEST = float(np.finfo(np.float32).max)


class Wanted(NamedTuple):
    """What any lane wants to have changed."""

    bias: Bool[Array, ""]
    words: Bool[Array, ""]
    repetition: Bool[Array, ""]
    counts: Bool[Array, ""]


def wanted(params: LaneParams, num_tokens: Int[Array, " B"], vocab_size: int) -> Wanted:
    """What lanes want that hold so many tokens."""
    is_counting = (params.frequency_penalty != 0) | (params.presence_penalty != 0)
    is_active = _is_active(params, num_tokens, vocab_size)
    has_words = params.bad_words[:, :, -1] >= 0
    is_repeating = params.repetition_penalty != 1
    return Wanted(*map(jnp.any, (is_active, has_words, is_repeating, is_counting)))


def apply(
    logits: Float[Array, "B V"],
    params: LaneParams,
    history: Int[Array, "B C"],
    num_tokens: Int[Array, " B"],
) -> Float[Array, "B V"]:
    """The logits tokens are chosen by; -inf where a token is banned.

    Args:
        logits: Finite ones.
        params: What each lane wants.
        history: Tokens of each lane, prompt and completion.
        num_tokens: How many of them count.
    """
    has = wanted(params, num_tokens, logits.shape[1])
    is_active = _is_active(params, num_tokens, logits.shape[1])
    is_repeating = params.repetition_penalty != 1
    is_counting = (params.frequency_penalty != 0) | (params.presence_penalty != 0)
    places = jnp.arange(history.shape[1])[None, :]
    is_held = (places < num_tokens[:, None]) & (history >= 0)
    is_sampled = is_held & (places >= params.num_prompt[:, None])

    def changed() -> Float[Array, "B V"]:
        x = _change_if(has.bias, logits, lambda x: _biased(x, params, is_active))
        x = _change_if(has.words, x, lambda x: _without_words(x, params, history, num_tokens))
        counted = is_held & is_repeating[:, None]
        x = _change_if(has.repetition, x, lambda x: _unrepeated(x, params, history, counted))
        sampled = is_sampled & is_counting[:, None]
        return _change_if(has.counts, x, lambda x: _uncounted(x, params, history, sampled))

    # One condition around all, so that the common step copies the logits at most once.
    return jax.lax.cond(functools.reduce(operator.or_, has), changed, lambda: logits)


def _is_active(
    params: LaneParams, num_tokens: Int[Array, " B"], vocab_size: int
) -> Bool[AnyArray, "B E"]:
    """Biases that count by now."""
    num_sampled = num_tokens - params.num_prompt
    return (params.bias_ids < vocab_size) & (params.bias_until > num_sampled[:, None])


def _change_if(wanted: Bool[Array, ""], x: Float[Array, "B V"], change) -> Float[Array, "B V"]:
    return jax.lax.cond(wanted, change, lambda x: x, x)


def _biased(
    logits: Float[Array, "B V"], params: LaneParams, is_active: Bool[AnyArray, "B E"]
) -> Float[Array, "B V"]:
    ids = jnp.where(is_active, params.bias_ids, logits.shape[1])
    return logits.at[_lanes(ids), ids].add(params.bias_values, mode="drop")


def _without_words(
    logits: Float[Array, "B V"],
    params: LaneParams,
    history: Int[Array, "B C"],
    num_tokens: Int[Array, " B"],
) -> Float[Array, "B V"]:
    """Bans the last token of every bad word whose other tokens end the completion."""
    words = jnp.asarray(params.bad_words)
    num_before = words.shape[2] - 1
    places = num_tokens[:, None] - jnp.arange(num_before, 0, -1)[None, :]
    tail = jnp.take_along_axis(history, jnp.clip(places, 0, history.shape[1] - 1), axis=1)
    # A word lies wholly in the completion: what comes before matches nothing.
    tail = jnp.where(places >= params.num_prompt[:, None], tail, -1)[:, None, :]
    before, last = words[:, :, :-1], words[:, :, -1]
    is_next = jnp.all((before == tail) | (before < 0), axis=-1) & (last >= 0)
    ids = jnp.where(is_next, last, logits.shape[1])
    return logits.at[_lanes(ids), ids].set(-jnp.inf, mode="drop")


def _unrepeated(
    logits: Float[Array, "B V"],
    params: LaneParams,
    history: Int[Array, "B C"],
    is_counted: Bool[Array, "B C"],
) -> Float[Array, "B V"]:
    penalty = params.repetition_penalty[:, None]
    is_seen = _counts(history, is_counted, logits.shape[1]) > 0
    penalised = jnp.where(logits > 0, logits / penalty, logits * penalty)
    return jnp.where(is_seen, _bounded(penalised, logits), logits)


def _uncounted(
    logits: Float[Array, "B V"],
    params: LaneParams,
    history: Int[Array, "B C"],
    is_counted: Bool[Array, "B C"],
) -> Float[Array, "B V"]:
    counts = _counts(history, is_counted, logits.shape[1])
    frequency = params.frequency_penalty[:, None] * counts.astype(jnp.float32)
    penalised = logits - frequency - params.presence_penalty[:, None]
    return jnp.where(counts > 0, _bounded(penalised, logits), logits)


def _counts(
    history: Int[Array, "B C"], is_counted: Bool[Array, "B C"], vocab_size: int
) -> Int[Array, "B V"]:
    """How often each token is among the counted ones."""
    ids = jnp.where(is_counted, history, vocab_size)
    counts = jnp.zeros((history.shape[0], vocab_size), jnp.int32)
    return counts.at[_lanes(ids), ids].add(1, mode="drop")


def _bounded(logits: Float[Array, "B V"], before: Float[Array, "B V"]) -> Float[Array, "B V"]:
    return jnp.where(before > -jnp.inf, jnp.clip(logits, -_LARGEST, _LARGEST), -jnp.inf)


def _lanes(ids: Int[Array, "B X"]) -> Int[Array, "B 1"]:
    return jnp.arange(ids.shape[0])[:, None]
