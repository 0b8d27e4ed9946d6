"""A histogram with fixed bounds: it stays as small as it begins, however much is counted.

Knows nothing of what is counted. One thread adds; another may read at any time.
"""

import bisect
import dataclasses
import itertools
import math


@dataclasses.dataclass(slots=True, kw_only=True)
class Histogram:
    """How many values lie between which bounds.

    Attributes:
        bounds: Upper bounds, rising; each belongs to its own bucket.
        counts: Values by bucket; the last bucket is for what is above all bounds.
    """

    bounds: list[float]
    counts: list[int] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        """Counts a value."""
        self.counts[bisect.bisect_left(self.bounds, value)] += 1

    def cumulative(self) -> list[tuple[float, int]]:
        """Each bound with how many values are not above it; the last bound is infinite."""
        # A copy first, so that each figure contains the one before it while values are added.
        return list(
            zip((*self.bounds, math.inf), itertools.accumulate(tuple(self.counts)), strict=True)
        )
