"""How many prompts or completions are how long: counts by ranges that hold for every job.

A length below 32 has a range of its own; above, sixteen ranges lie between each power of two and
the next. So counts of parts can be added, and take little room in a record, however many rows there
are. A range goes by its first length.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

_BITS = 4
_EXACT = 2 << _BITS
_SHOWN_SHARE = 0.995
_FAR = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Counts between edges that are equally far apart.

    Attributes:
        edges: The edges, one more than there are counts.
        counts: The counts.
        num_beyond: How many lengths lie beyond the last edge: the few longest ones.
    """

    edges: Sequence[int]
    counts: Sequence[int]
    num_beyond: int


def first_of(length: int) -> int:
    """The first length of the range that a length is in."""
    width = width_of(length)
    return length - length % width


def width_of(length: int) -> int:
    """How many lengths the range of a length has."""
    return 1 if length < _EXACT else 1 << (length.bit_length() - 1 - _BITS)


def count(lengths: npt.NDArray[np.integer]) -> collections.Counter[int]:
    """Counts by range."""
    counts: collections.Counter[int] = collections.Counter()
    values, numbers = np.unique(lengths, return_counts=True)
    for value, number in zip(values.tolist(), numbers.tolist(), strict=True):
        # Of a damaged part, a length may be anything.
        counts[first_of(max(0, value))] += number
    return counts


def quantile(counts: Mapping[int, int], share: float) -> int:
    """The first length of the range up to which a share of the lengths lies; 0 of none."""
    left = share * sum(counts.values())
    for first in sorted(counts):
        left -= counts[first]
        if left <= 0:
            return first
    return max(counts, default=0)


def histogram(counts: Mapping[int, int]) -> Histogram:
    """The counts as bars of one width, from the shortest length.

    The width is that of the longest range shown: all others fit into such bars as a whole. A few
    lengths that are far longer than all others are left out.
    """
    longest, usual = max(counts, default=0), quantile(counts, _SHOWN_SHARE)
    if longest > _FAR * usual:
        longest = usual
    width = width_of(longest)
    start = min(counts, default=0) // width * width
    edges = list(range(start, longest + width + 1, width))
    bars = [0] * (len(edges) - 1)
    num_beyond = 0
    for first, number in counts.items():
        place = (first - start) // width
        if place < len(bars):
            bars[place] += number
        else:
            num_beyond += number
    return Histogram(edges=edges, counts=bars, num_beyond=num_beyond)
