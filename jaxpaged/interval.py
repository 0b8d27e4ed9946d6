"""Ranges of numbers: what lies in one, and how people and JSON Schema are told of it."""

import dataclasses
import math


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """All numbers between two bounds; NaN lies in none.

    Attributes:
        least: The lowest of them.
        above: They are above this one.
        most: The highest of them.
        below: They are below this one.
        has_none: None lies in it, too.
        words: What they are, for people, where the bounds alone say too little.
    """

    least: float | int = -math.inf
    above: float | int = -math.inf
    most: float | int = math.inf
    below: float | int = math.inf
    has_none: bool = False
    words: str | None = None

    def __contains__(self, value: float | int | None) -> bool:
        if value is None:
            return self.has_none
        return self.least <= value <= self.most and self.above < value < self.below

    def __str__(self) -> str:
        return self.words or " and ".join(self._bounds())

    def json_schema(self) -> dict[str, float | int]:
        """The bounds as keywords of JSON Schema."""
        bounds = {
            "minimum": self.least,
            "exclusiveMinimum": self.above,
            "maximum": self.most,
            "exclusiveMaximum": self.below,
        }
        return {keyword: bound for keyword, bound in bounds.items() if math.isfinite(bound)}

    def _bounds(self) -> list[str]:
        if math.isfinite(self.least) and math.isfinite(self.most):
            return [f"from {self.least:,} to {self.most:,}"]
        words = {
            "at least": self.least,
            "above": self.above,
            "at most": self.most,
            "below": self.below,
        }
        return [f"{word} {bound:,}" for word, bound in words.items() if math.isfinite(bound)]
