"""Choosing the next token: pure functions of logits, parameters and keys.

A lane's random number depends on its key and on how many tokens it has sampled, and on nothing of
the batch. Thresholds are found by bisection on the bit patterns of floats, which is exact and
needs no sort of the vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxpaged.shapes import AnyArray

MAX_BANNED = 16
"""Most token ids that `min_tokens` can ban for one sequence."""

INVALID_TOKEN = -1
"""Returned for a lane whose logits are not all finite."""

_DRAW_CHUNK = 256

# Below it all but the peak have no weight anyway, unless they differ by less than rounding.
_LEAST_TEMPERATURE = 1e-6


class SamplingBatch(NamedTuple):
    """The sampling parameters of every lane."""

    temperature: Float[AnyArray, " B"]
    """0 is greedy."""
    top_k: Int[AnyArray, " B"]
    """0 keeps all."""
    top_p: Float[AnyArray, " B"]
    """1 keeps all."""
    min_p: Float[AnyArray, " B"]
    """0 keeps all."""
    keys: UInt32[AnyArray, "B 2"]
    """Random key of each sequence."""
    draws: Int[AnyArray, " B"]
    """Tokens the sequence has sampled so far: which random number of its key is next."""
    banned_ids: Int[AnyArray, "B E"]
    """Tokens that must not be sampled; unused entries are out of the vocabulary."""


def sample(logits: Float[Array, "B V"], batch: SamplingBatch) -> Int[Array, " B"]:
    """The next token of every lane, or `INVALID_TOKEN` where a logit is NaN or infinite.

    Lanes with temperature 0 take the most likely token (the lowest id among equals).
    """
    is_finite = jnp.isfinite(logits.max(axis=-1)) & jnp.isfinite(logits.min(axis=-1))
    lanes = jnp.arange(logits.shape[0])[:, None]
    logits = logits.at[lanes, batch.banned_ids].set(-jnp.inf, mode="drop")
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    is_random = batch.temperature > 0
    tokens = jax.lax.cond(
        jnp.any(is_random & is_finite),
        lambda: jnp.where(is_random, _sample_random(logits, batch), greedy),
        lambda: greedy,
    )
    return jnp.where(is_finite, tokens, INVALID_TOKEN)


def keep_mask(logits: Float[Array, "B V"], batch: SamplingBatch) -> Bool[Array, "B V"]:
    """Which tokens the top-k, top-p and min-p filters leave, in that order; at least one.

    Args:
        logits: Divided by the temperature, the largest of each lane being 0.
        batch: The filters. Of equal logits at the border top-k keeps those of the lowest ids,
            top-p and min-p keep all.
    """
    kept = logits > -jnp.inf
    kept &= _filtered(jnp.asarray(batch.top_k > 0), lambda: _top_k(logits, batch.top_k))
    kept &= _filtered(jnp.asarray(batch.top_p < 1), lambda: _top_p(logits, kept, batch.top_p))
    return kept & (logits >= jnp.log(batch.min_p)[:, None])


def _filtered(wanted: Bool[Array, " B"], make) -> Bool[Array, "B V"] | Bool[Array, "B 1"]:
    """The filter's mask for lanes that want it, computed only if one does."""
    shape = jax.eval_shape(make)
    mask = jax.lax.cond(jnp.any(wanted), make, lambda: jnp.ones(shape.shape, bool))
    return mask | ~wanted[:, None]


def _sample_random(logits: Float[Array, "B V"], batch: SamplingBatch) -> Int[Array, " B"]:
    # Greedy lanes take part with any temperature; their result is not used.
    temperature = jnp.where(batch.temperature > 0, batch.temperature, 1.0)
    temperature = jnp.maximum(temperature, _LEAST_TEMPERATURE)
    # The peak is taken off before the division, so that its weight is exactly 1.
    scaled = (logits - logits.max(axis=-1, keepdims=True)) / temperature[:, None]
    weights = jnp.where(keep_mask(scaled, batch), jnp.exp(scaled), 0)
    keys = jax.random.wrap_key_data(jnp.asarray(batch.keys), impl="threefry2x32")
    keys = jax.vmap(jax.random.fold_in)(keys, batch.draws)
    uniform = jax.vmap(lambda key: jax.random.uniform(key, dtype=jnp.float32))(keys)
    return _draw(weights, uniform)


def _draw(weights: Float[Array, "B V"], uniform: Float[Array, " B"]) -> Int[Array, " B"]:
    """The first token at which the running sum of weights exceeds `uniform` times the total.

    In two levels, chunks and tokens within one, so that no running sum over the whole vocabulary
    is needed. Tokens of weight zero are never drawn.
    """
    num_lanes, vocab_size = weights.shape
    padding = -vocab_size % _DRAW_CHUNK
    chunks = jnp.pad(weights, ((0, 0), (0, padding))).reshape(num_lanes, -1, _DRAW_CHUNK)
    upto = jnp.cumsum(chunks.sum(axis=-1), axis=-1)
    chunk, rest = _cross(upto, uniform * upto[:, -1])
    within = jnp.take_along_axis(chunks, chunk[:, None, None], axis=1)[:, 0]
    index, _ = _cross(jnp.cumsum(within, axis=-1), rest)
    # Rounding may leave the sum of a chunk above its running sum: take its last weight then.
    last = _DRAW_CHUNK - 1 - jnp.argmax(within[:, ::-1] > 0, axis=-1)
    return (chunk * _DRAW_CHUNK + jnp.minimum(index, last)).astype(jnp.int32)


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


def _top_k(logits: Float[Array, "B V"], top_k: Int[AnyArray, " B"]) -> Bool[Array, "B V"]:
    num_lanes, vocab_size = logits.shape
    codes = _ordered_bits(logits)
    wanted = jnp.minimum(top_k, vocab_size)

    def reach(values: UInt32[Array, "B V"], count: Int[Array, " B"], bits: int):
        """The largest threshold at or above which there are `count` values."""

        def is_reached(code: UInt32[Array, " B"]) -> Bool[Array, " B"]:
            return jnp.sum(values >= code[:, None], axis=-1) >= count

        return _bisect(is_reached, num_lanes, bits)[:, None]

    threshold = reach(codes, wanted, 32)
    above = codes > threshold
    # Of those at the threshold, the lowest ids: counted down, so that low ids are large.
    countdown = jnp.arange(vocab_size, 0, -1, dtype=jnp.uint32)[None, :]
    tied = jnp.where(codes == threshold, countdown, 0)
    left = wanted - jnp.sum(above, axis=-1)
    return above | (tied >= reach(tied, left, vocab_size.bit_length()))


def _top_p(
    logits: Float[Array, "B V"], kept: Bool[Array, "B V"], top_p: Float[AnyArray, " B"]
) -> Bool[Array, "B V"]:
    codes = _ordered_bits(logits)
    weights = jnp.where(kept, jnp.exp(logits), 0)
    wanted = top_p * weights.sum(axis=-1)

    def reaches(code: UInt32[Array, " B"]) -> Bool[Array, " B"]:
        return jnp.sum(jnp.where(codes >= code[:, None], weights, 0), axis=-1) >= wanted

    # The peak stays even if its share alone, or a share that is 0 in float32, was asked for.
    return (codes >= _bisect(reaches, logits.shape[0], 32)[:, None]) | (logits >= 0)


def _ordered_bits(x: Float[Array, "B V"]) -> UInt32[Array, "B V"]:
    """Unsigned integers in the same order as the floats."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _bisect(is_low_enough, num_lanes: int, bits: int) -> UInt32[Array, " B"]:
    """The largest code of so many bits, per lane, for which the falling condition still holds."""

    def set_bit(step: Int[Array, ""], code: UInt32[Array, " B"]) -> UInt32[Array, " B"]:
        candidate = code | (jnp.uint32(1 << (bits - 1)) >> step.astype(jnp.uint32))
        return jnp.where(is_low_enough(candidate), candidate, code)

    return jax.lax.fori_loop(0, bits, set_bit, jnp.zeros(num_lanes, jnp.uint32))
