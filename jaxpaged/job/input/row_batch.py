"""A few rows as they were read: the value that passes from the reader to the output's table."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from jaxpaged.job.prompt.row_fault import RowFault
from jaxpaged.job.units import Unit

# Stands for a cell that has no Python value.
_UNREADABLE = object()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowBatch:
    """Consecutive rows of one row group and of one unit.

    Attributes:
        unit: The unit they belong to.
        start: The global index of the first row.
        file: The file's name in the plan.
        row_group: The row group's index in the file.
        first_index: The first row's index in the row group.
        cells: The needed columns as plain arrays: extension types as their storage, dictionaries
            decoded, views as large strings. Where a row is not valid UTF-8 the cell is null.
        invalid: By a row's offset in the batch, the column that is not valid UTF-8.
    """

    unit: Unit
    start: int
    file: str
    row_group: int
    first_index: int
    cells: pa.RecordBatch
    invalid: Mapping[int, str]

    def __len__(self) -> int:
        return self.cells.num_rows

    def values(self, column: str) -> list[Any]:
        """The cells of a column as Python values, narrow floats as they are usually written."""
        array = self.cells.column(column)
        values = _values(array)
        if _has_narrow_float(array.type):
            return [_shortest(value, array.type) for value in values]
        return values

    def rows(self, columns: Sequence[str]) -> Iterator["Row"]:
        """The rows, with their cells of some columns."""
        values = [self.values(name) for name in columns]
        for offset in range(len(self)):
            cells = {name: cells[offset] for name, cells in zip(columns, values, strict=True)}
            yield Row(batch=self, offset=offset, cells=cells)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of a batch.

    Attributes:
        batch: The batch.
        offset: The row's offset in it.
        cells: Some of its cells as Python values, by column.
    """

    batch: RowBatch
    offset: int
    cells: Mapping[str, Any]

    @property
    def number(self) -> int:
        """The row's global index."""
        return self.batch.start + self.offset

    @property
    def index(self) -> int:
        """The row's index in its row group."""
        return self.batch.first_index + self.offset

    @property
    def place(self) -> str:
        """The row's address, for people."""
        return f"{self.batch.file}, row group {self.batch.row_group}, row {self.index}"

    def check(self) -> None:
        """Raises RowFault if a cell could not be read."""
        if self.offset in self.batch.invalid:
            column = self.batch.invalid[self.offset]
            reason = f"column {column!r} is not valid UTF-8; it is written as null"
            raise RowFault("invalid_utf8", reason)
        for name, cell in self.cells.items():
            if cell is _UNREADABLE:
                raise RowFault("bad_type", f"column {name!r} holds a moment out of range")


def _values(array: pa.Array) -> list[Any]:
    try:
        return array.to_pylist()
    except (ValueError, OverflowError):
        # A moment that Python's datetime cannot hold: nanoseconds, or the year 10000.
        if pt.is_temporal(array.type):
            return array.cast(pa.string()).to_pylist()
        return [_value(cell) for cell in array]


def _value(cell: pa.Scalar) -> object:
    try:
        return cell.as_py()
    except (ValueError, OverflowError):
        return _UNREADABLE


def _has_narrow_float(kind: pa.DataType) -> bool:
    if pt.is_floating(kind):
        return kind.bit_width < 64
    return any(_has_narrow_float(kind.field(index).type) for index in range(kind.num_fields))


def _shortest(value: Any, kind: pa.DataType) -> Any:  # noqa: ANN401
    """The value with 0.1 for the float32 that Python shows as 0.10000000149011612."""
    if value is None:
        return None
    if pt.is_floating(kind) and kind.bit_width < 64:
        narrow = np.float32 if kind.bit_width == 32 else np.float16
        return float(str(narrow(value)))
    if pt.is_struct(kind):
        return {field.name: _shortest(value[field.name], field.type) for field in kind}
    if isinstance(value, list) and not pt.is_map(kind):
        return [_shortest(item, kind.value_type) for item in value]
    return value
