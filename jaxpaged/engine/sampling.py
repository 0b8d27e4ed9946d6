"""Choosing the next token: pure functions of logits, parameters, history and keys.

A lane's random number depends on its key and on how many tokens it has sampled, and on nothing of
the batch. The order is that of vLLM and of Hugging Face's `generate`: what `penalties` changes on
the logits, then the temperature, then the filters.
"""

import functools
import math
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxpaged.engine import filters, logprobs, penalties
from jaxpaged.engine.lane_params import LaneParams
from jaxpaged.engine.logprobs import MAX_ALTERNATIVES, Scale
from jaxpaged.shapes import AnyArray

INVALID_TOKEN = -1
"""Returned for a lane whose logits are not all finite, or all of whose tokens are banned."""

_CHUNK = 256

# Below it all but the peak have no weight anyway, unless they differ by less than rounding.
_LEAST_TEMPERATURE = 1e-6


class Sampled(NamedTuple):
    """One token per row and how likely it was."""

    tokens: Int[AnyArray, " B"]
    """`INVALID_TOKEN` where none could be chosen."""
    logprobs: Float[AnyArray, " B"]
    """Natural logarithm of the token's probability; 0 where not wanted."""
    ranks: Int[AnyArray, " B"]
    """1 for the likeliest token, of equals that of the lowest id; 0 where not wanted."""
    top_ids: Int[AnyArray, "B A"]
    """The likeliest tokens, the likeliest first; -1 where not wanted."""
    top_logprobs: Float[AnyArray, "B A"]
    """Their log-probabilities; 0 where not wanted."""


def sample(
    logits: Float[Array, "B V"],
    params: LaneParams,
    history: Int[AnyArray, "B C"],
    num_tokens: Int[AnyArray, " B"],
) -> Sampled:
    """The next token of every lane.

    Lanes with temperature 0 take the most likely token (the lowest id among equals).

    Log-probabilities are those of the model itself, whatever the parameters. Those of beams are
    what a beam search adds up, as Hugging Face does it: the model's log-probabilities with the
    changes of `penalties` made to them, and not normalised again.

    Args:
        logits: Of each lane's last token.
        params: How to choose.
        history: Tokens of each lane, prompt and completion.
        num_tokens: How many of them count.
    """
    params = LaneParams(*map(jnp.asarray, params))
    history, num_tokens = jnp.asarray(history), jnp.asarray(num_tokens)
    # By a sum, since `max` and `min` may pass over NaN, as XLA's do on CPUs. Infinity less itself
    # is NaN.
    is_finite = jnp.sum(logits - logits, axis=-1) == 0
    changes = penalties.wanted(params, num_tokens, logits.shape[1])
    is_more = (params.temperature > 0) | (params.num_logprobs >= 0) | params.is_beam
    # Most steps want the likeliest tokens and nothing else: they get by without copies of logits.
    return jax.lax.cond(
        functools.reduce(operator.or_, changes) | jnp.any(is_more),
        lambda: _sample(logits, params, history, num_tokens, is_finite),
        lambda: _likeliest(logits, is_finite),
    )


def _likeliest(logits: Float[Array, "B V"], is_finite: Bool[Array, " B"]) -> Sampled:
    num_lanes = logits.shape[0]
    tokens = jnp.where(is_finite, _first_largest(logits), INVALID_TOKEN)
    zeros = jnp.zeros(num_lanes)
    return Sampled(tokens, zeros, zeros.astype(jnp.int32), *_no_alternatives(num_lanes))


def _no_alternatives(num_lanes: int) -> tuple[Int[Array, "B A"], Float[Array, "B A"]]:
    shape = (num_lanes, MAX_ALTERNATIVES)
    return jnp.full(shape, -1, jnp.int32), jnp.zeros(shape)


def _sample(
    logits: Float[Array, "B V"],
    params: LaneParams,
    history: Int[Array, "B C"],
    num_tokens: Int[Array, " B"],
    is_finite: Bool[Array, " B"],
) -> Sampled:
    is_beam = params.is_beam
    logits = jax.lax.cond(
        jnp.any(is_beam),
        lambda x: jnp.where(is_beam[:, None], logprobs.scale_of(x).logprobs(x), x),
        lambda x: x,
        logits,
    )
    changed = penalties.apply(logits, params, history, num_tokens)
    tokens = _choose(changed, params, num_tokens - params.num_prompt, is_finite)
    is_possible = jnp.take_along_axis(changed, tokens[:, None], axis=1)[:, 0] > -jnp.inf
    scored = _scored(logits, changed, tokens, params)
    is_valid = is_finite & is_possible
    wants_own = is_valid & ((params.num_logprobs >= 0) | is_beam)
    wants_top = is_valid & ((params.num_logprobs > 0) | is_beam)
    # What was computed for a neighbour's sake is not shown.
    return Sampled(
        tokens=jnp.where(is_valid, tokens, INVALID_TOKEN),
        logprobs=jnp.where(wants_own, scored.logprobs, 0),
        ranks=jnp.where(wants_own, scored.ranks, 0),
        top_ids=jnp.where(wants_top[:, None], scored.top_ids, -1),
        top_logprobs=jnp.where(wants_top[:, None], scored.top_logprobs, 0),
    )


def score_prompt(logits: Float[Array, "R V"], targets: Int[AnyArray, " R"]) -> Sampled:
    """How likely the model found the targets; NaN where a logit of the row is NaN or +infinity."""
    targets = jnp.asarray(targets)
    scale = logprobs.scale_of(logits)
    own = logprobs.score(logits, scale, targets)
    return Sampled(targets, *own, *logprobs.alternatives(logits, scale))


def _choose(
    logits: Float[Array, "B V"],
    params: LaneParams,
    draws: Int[Array, " B"],
    is_finite: Bool[Array, " B"],
) -> Int[Array, " B"]:
    greedy = _first_largest(logits)
    is_random = params.temperature > 0
    return jax.lax.cond(
        jnp.any(is_random & is_finite),
        lambda: jnp.where(is_random, _sample_random(logits, params, draws), greedy),
        lambda: greedy,
    )


def _first_largest(logits: Float[Array, "B V"]) -> Int[Array, " B"]:
    """The lowest id of the largest logits.

    First the chunk, then the token within it: `argmax` is slow on CPUs, `max` is not.
    """
    num_lanes, vocab_size = logits.shape
    width = math.gcd(vocab_size, _CHUNK)
    chunks = logits.reshape(num_lanes, -1, width)
    chunk = jnp.argmax(chunks.max(axis=-1), axis=-1)
    within = jnp.take_along_axis(chunks, chunk[:, None, None], axis=1)[:, 0]
    return (chunk * width + jnp.argmax(within, axis=-1)).astype(jnp.int32)


def _scored(
    logits: Float[Array, "B V"],
    changed: Float[Array, "B V"],
    tokens: Int[Array, " B"],
    params: LaneParams,
) -> Sampled:
    """The tokens with what any lane wants to know; the other lanes' places hold anything."""
    num_lanes = logits.shape[0]
    is_beam = params.is_beam
    wants_top = jnp.any((params.num_logprobs > 0) | is_beam)
    no_top = _no_alternatives(num_lanes)

    def scored() -> Sampled:
        scale = logprobs.scale_of(logits)
        # What beams add up is a log-probability already.
        scale = Scale(*(jnp.where(is_beam, 0, part) for part in scale))
        values = jnp.where(is_beam[:, None], changed, logits)
        own = logprobs.score(values, scale, tokens)
        top = jax.lax.cond(wants_top, lambda: logprobs.alternatives(values, scale), lambda: no_top)
        return Sampled(tokens, *own, *top)

    def unscored() -> Sampled:
        zeros = jnp.zeros(num_lanes)
        return Sampled(tokens, zeros, zeros.astype(jnp.int32), *no_top)

    return jax.lax.cond(wants_top | jnp.any(params.num_logprobs >= 0), scored, unscored)


def _sample_random(
    logits: Float[Array, "B V"], params: LaneParams, draws: Int[Array, " B"]
) -> Int[Array, " B"]:
    # Greedy lanes take part with any temperature; their result is not used.
    temperature = jnp.where(params.temperature > 0, params.temperature, 1.0)
    temperature = jnp.maximum(temperature, _LEAST_TEMPERATURE)
    # The peak is taken off before the division, so that its weight is exactly 1.
    scaled = (logits - logits.max(axis=-1, keepdims=True)) / temperature[:, None]
    weights = jnp.where(filters.keep_mask(scaled, params), jnp.exp(scaled), 0)
    keys = jax.random.wrap_key_data(jnp.asarray(params.keys), impl="threefry2x32")
    keys = jax.vmap(jax.random.fold_in)(keys, draws)
    uniform = jax.vmap(lambda key: jax.random.uniform(key, dtype=jnp.float32))(keys)
    return _draw(weights, uniform)


def _draw(weights: Float[Array, "B V"], uniform: Float[Array, " B"]) -> Int[Array, " B"]:
    """The first token at which the running sum of weights exceeds `uniform` times the total.

    In two levels, chunks and tokens within one, so that no running sum over the whole vocabulary
    is needed. Tokens of weight zero are never drawn.
    """
    num_lanes, vocab_size = weights.shape
    padding = -vocab_size % _CHUNK
    chunks = jnp.pad(weights, ((0, 0), (0, padding))).reshape(num_lanes, -1, _CHUNK)
    upto = jnp.cumsum(chunks.sum(axis=-1), axis=-1)
    chunk, rest = _cross(upto, uniform * upto[:, -1])
    within = jnp.take_along_axis(chunks, chunk[:, None, None], axis=1)[:, 0]
    index, _ = _cross(jnp.cumsum(within, axis=-1), rest)
    # Rounding may leave the sum of a chunk above its running sum: take its last weight then.
    last = _CHUNK - 1 - jnp.argmax(within[:, ::-1] > 0, axis=-1)
    return (chunk * _CHUNK + jnp.minimum(index, last)).astype(jnp.int32)


def _cross(
    upto: Float[Array, "B X"], target: Float[Array, " B"]
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """The first index whose running sum exceeds the target, and what is left of the target."""
    # Rounding up to the total itself must not lead past the last entry that adds something.
    below = jnp.nextafter(upto[:, -1], jnp.float32(0))
    target = jnp.minimum(target, below)
    index = jnp.sum(upto <= target[:, None], axis=-1)
    before = jnp.where(
        index > 0, jnp.take_along_axis(upto, jnp.maximum(index - 1, 0)[:, None], axis=1)[:, 0], 0
    )
    return index, target - before
