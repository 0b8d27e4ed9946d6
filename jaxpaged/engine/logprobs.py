"""Log-probabilities of tokens, their ranks and their likeliest alternatives.

A token's rank is 1 for the likeliest; of equally likely tokens the lower ids come first, here as
in the greedy choice.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxpaged.request import MAX_BEAMS

MAX_ALTERNATIVES = 2 * MAX_BEAMS
"""Alternatives computed where any are wanted.

A beam search of width n with e stop tokens needs the n + e likeliest continuations of a beam.
"""


class Scale(NamedTuple):
    """What makes logits log-probabilities: less `peak`, then less `log_total`.

    Two numbers, since their sum would round away what distinguishes likely tokens of large logits.
    """

    peak: Float[Array, " R"]
    log_total: Float[Array, " R"]

    def logprobs(self, logits: Float[Array, "R X"]) -> Float[Array, "R X"]:
        """The log-probabilities of logits of each row."""
        return (logits - self.peak[:, None]) - self.log_total[:, None]


def scale_of(logits: Float[Array, "R V"]) -> Scale:
    """The scale of the softmax."""
    peak = logits.max(axis=-1)
    return Scale(peak, jnp.log(jnp.exp(logits - peak[:, None]).sum(axis=-1)))


def score(
    logits: Float[Array, "R V"], scale: Scale, tokens: Int[Array, " R"]
) -> tuple[Float[Array, " R"], Int[Array, " R"]]:
    """Log-probability and rank of one token per row."""
    own = jnp.take_along_axis(logits, tokens[:, None], axis=1)
    ids = jnp.arange(logits.shape[1], dtype=tokens.dtype)[None, :]
    is_before = (logits > own) | ((logits == own) & (ids < tokens[:, None]))
    ranks = 1 + jnp.sum(is_before, axis=-1, dtype=jnp.int32)
    return scale.logprobs(own)[:, 0], ranks


def alternatives(
    logits: Float[Array, "R V"], scale: Scale
) -> tuple[Int[Array, "R A"], Float[Array, "R A"]]:
    """The likeliest tokens of each row with their log-probabilities, the likeliest first.

    Places for which the vocabulary has no token hold -1 and -inf.
    """
    num = min(MAX_ALTERNATIVES, logits.shape[1])
    # `top_k` would put -0 behind 0, which are equal.
    top, ids = jax.lax.top_k(jnp.where(logits == 0, 0, logits), num)
    padding = ((0, 0), (0, MAX_ALTERNATIVES - num))
    return (
        jnp.pad(ids, padding, constant_values=-1),
        jnp.pad(scale.logprobs(top), padding, constant_values=-jnp.inf),
    )
