"""Rows at the same addresses in two outputs, compared column by column: counts and a few examples.

Knows record batches, neither folders nor jobs.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from jaxpaged.job.input import cells
from jaxpaged.job.look import cell_difference

MAX_SAMPLES = 10
KEY = "row"
"""The column that is not compared: it is the same by definition."""

_MAX_CHARS = 200
_CONTEXT_CHARS = 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChangedCell:
    """A cell that differs.

    Attributes:
        column: Its column.
        a: Its text in the first output, from a little before where the two differ; cut.
        b: The same in the second one.
    """

    column: str
    a: str
    b: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChangedRow:
    """A row that differs, by its address."""

    file: str
    row_group: int
    index: int
    cells: tuple[ChangedCell, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RetypedColumn:
    """A column whose type differs.

    Attributes:
        name: The column.
        a: Its type in the first output.
        b: Its type in the second one.
        is_compared: Its cells were compared by value, in a type that takes both. If there is no
            such type, it counts as changed in every row.
    """

    name: str
    a: str
    b: str
    is_compared: bool


class RowComparison:
    """Running counts over rows of two outputs.

    Args:
        a: Name and type of each column of the first output.
        b: The same of the second one.

    Attributes:
        same: Rows that are the same.
        changed: Rows that are not.
        only_in_a: Rows that only the first output has.
        only_in_b: Rows that only the second one has.
        columns: By column of both, the rows in which it differs.
        sample: The first rows that differ.
    """

    def __init__(self, a: Sequence[tuple[str, str]], b: Sequence[tuple[str, str]]) -> None:
        self._a, self._b = dict(a), dict(b)
        self._incomparable: set[str] = set()
        self.same = self.changed = self.only_in_a = self.only_in_b = 0
        self.columns = {name: 0 for name in self._a if name in self._b and name != KEY}
        self.sample: list[ChangedRow] = []

    def add(self, a: pa.RecordBatch | None, b: pa.RecordBatch | None) -> None:
        """Counts rows at the same addresses; None for an output that does not have them."""
        if a is not None and b is not None:
            self._compare(a, b)
        elif a is not None:
            self.only_in_a += len(a)
        elif b is not None:
            self.only_in_b += len(b)

    def retyped(self) -> Iterator[RetypedColumn]:
        """The columns whose types differ."""
        for name in self.columns:
            a, b = self._a[name], self._b[name]
            if a != b:
                is_compared = name not in self._incomparable
                yield RetypedColumn(name=name, a=a, b=b, is_compared=is_compared)

    def _compare(self, a: pa.RecordBatch, b: pa.RecordBatch) -> None:
        names = list(self.columns)
        plain_a, plain_b = cells.plain(a, names), cells.plain(b, names)
        masks: dict[str, cell_difference.Mask] = {}
        is_changed = np.zeros(len(a), np.bool_)
        for name in names:
            mask = self._differ(name, plain_a[name], plain_b[name])
            if mask.any():
                masks[name] = mask
                is_changed |= mask
        num_changed = int(is_changed.sum())
        self.changed += num_changed
        self.same += len(a) - num_changed
        for place in np.flatnonzero(is_changed)[: MAX_SAMPLES - len(self.sample)].tolist():
            changed = tuple(
                _changed_cell(name, plain_a[name][place], plain_b[name][place])
                for name, mask in masks.items()
                if mask[place]
            )
            self.sample.append(ChangedRow(**a[KEY][place].as_py(), cells=changed))

    def _differ(self, name: str, a: pa.Array, b: pa.Array) -> cell_difference.Mask:
        if cell_difference.common_type(a.type, b.type) is None:
            self._incomparable.add(name)
        mask = cell_difference.differ(a, b)
        self.columns[name] += int(mask.sum())
        return mask


def _changed_cell(name: str, a: pa.Scalar, b: pa.Scalar) -> ChangedCell:
    text_a, text_b = _text(a), _text(b)
    pairs = enumerate(zip(text_a, text_b, strict=False))
    shared = next((i for i, (x, y) in pairs if x != y), min(len(text_a), len(text_b)))
    start = max(0, shared - _CONTEXT_CHARS)
    return ChangedCell(column=name, a=_excerpt(text_a, start), b=_excerpt(text_b, start))


def _text(cell: pa.Scalar) -> str:
    try:
        value: Any = cell.as_py()
    except (ValueError, OverflowError):
        return "(a value that Python has no type for)"
    return "null" if value is None else str(value)


def _excerpt(text: str, start: int) -> str:
    shown = text[start : start + _MAX_CHARS]
    before, after = "..." if start else "", "..." if start + _MAX_CHARS < len(text) else ""
    return f"{before}{shown}{after}"
