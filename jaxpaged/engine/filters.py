"""Which tokens are left to draw from: top-k, top-p, min-p and typical filters.

Thresholds are found by bisection on the bit patterns of floats, which is exact and needs no sort
of the vocabulary.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxpaged.engine.lane_params import LaneParams
from jaxpaged.shapes import AnyArray


def keep_mask(logits: Float[Array, "B V"], params: LaneParams) -> Bool[Array, "B V"]:
    """Which tokens the top-k, top-p, min-p and typical filters leave, in that order; at least one.

    Each filter sees what those before it left, as if the rest had no probability. A filter is
    computed only if a lane that is not greedy wants it, and changes no other lane.

    Args:
        logits: Divided by the temperature, the largest of each lane being 0.
        params: The filters. Of equal logits at the border top-k keeps those of the lowest ids,
            the others keep all.
    """
    is_random = jnp.asarray(params.temperature > 0)

    def filtered(wanted: Bool[AnyArray, " B"], kept: Bool[Array, "B V"], mask):
        wanted = is_random & wanted
        return jax.lax.cond(
            jnp.any(wanted), lambda kept: kept & (mask(kept) | ~wanted[:, None]), lambda k: k, kept
        )

    kept = logits > -jnp.inf
    kept = filtered(params.top_k > 0, kept, lambda _: _top_k(logits, params.top_k))
    kept = filtered(params.top_p < 1, kept, lambda kept: _top_p(logits, kept, params.top_p))
    kept &= logits >= jnp.log(params.min_p)[:, None]
    return filtered(
        params.typical_p < 1, kept, lambda kept: _typical(logits, kept, params.typical_p)
    )


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
    return _share(logits, jnp.where(kept, jnp.exp(logits), 0), top_p)


def _typical(
    logits: Float[Array, "B V"], kept: Bool[Array, "B V"], typical_p: Float[AnyArray, " B"]
) -> Bool[Array, "B V"]:
    """The tokens whose logits are nearest to the expected one.

    A token's surprise is a constant less its logit, so that the distance between its surprise and
    the expected surprise, the entropy, is that between the logits.
    """
    weights = jnp.where(kept, jnp.exp(logits), 0)
    moments = jnp.where(kept, weights * logits, 0)
    expected = moments.sum(axis=-1) / weights.sum(axis=-1)
    nearness = -jnp.abs(logits - expected[:, None])
    return _share(jnp.where(kept, nearness, -jnp.inf), weights, typical_p)


def _share(
    values: Float[Array, "B V"], weights: Float[Array, "B V"], share: Float[AnyArray, " B"]
) -> Bool[Array, "B V"]:
    """The tokens of the largest values, as few as hold that share of the weights; at least one."""
    codes = _ordered_bits(values)
    wanted = share * weights.sum(axis=-1)

    def reaches(code: UInt32[Array, " B"]) -> Bool[Array, " B"]:
        return jnp.sum(jnp.where(codes >= code[:, None], weights, 0), axis=-1) >= wanted

    # The first stays even if its share alone, or a share that is 0 in float32, was asked for.
    first = values.max(axis=-1, keepdims=True)
    return (codes >= _bisect(reaches, values.shape[0], 32)[:, None]) | (values >= first)


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
