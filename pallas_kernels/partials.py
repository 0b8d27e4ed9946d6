"""Partial results of decode attention: what the partitions of a query's context come to."""

from typing import NamedTuple

from jaxtyping import Array, Float

PARTITION_TOKENS = 256
"""Keys of one partition. Its partial result is 1 to 3 % of the keys and values it comes from."""


class Partials(NamedTuple):
    """Softmax-weighted sums, one for each of `P` partitions and `G` query heads of a group.

    Partition `p` holds the keys at positions `p * PARTITION_TOKENS` to the next one's first. With
    the log-sum-exp of the scores, `peak + log(total)`, and the attention to these keys alone,
    `weighted / total`, it says all that the merge needs to know of them.
    """

    weighted: Float[Array, "T K P G D"]
    """Sum of exp(score - peak) * value."""
    peak: Float[Array, "T K P G"]
    """Largest score."""
    total: Float[Array, "T K P G"]
    """Sum of exp(score - peak)."""
