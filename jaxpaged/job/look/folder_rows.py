"""The rows of an output folder by their indices in it, a row group of a part at a time.

Where each row of the input gave several rows, each of those has an index.

Makes sure that the rows it hands out are those that their place says. Changes nothing.
"""

import bisect
import contextlib
import dataclasses
import itertools
import types

import pyarrow as pa
import pyarrow.parquet as pq

from jaxpaged.errors import OutputConflictError, StorageError
from jaxpaged.job.look import known_job
from jaxpaged.job.output import output_view
from jaxpaged.job.output.history import History
from jaxpaged.job.output.row_addresses import RowAddresses
from jaxpaged.job.units import Unit
from jaxpaged.storage.store import Store


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Consecutive rows.

    Attributes:
        num_rows: How many.
        cells: Their columns as they are stored; None if their part is missing.
    """

    num_rows: int
    cells: pa.RecordBatch | None


class FolderRows:
    """The rows of one output; use it in a `with` statement.

    Rows that are asked for in order are read once.

    Args:
        store: The output.
        known: What it remembers.

    Attributes:
        rows_each: Rows of the output for each row of the input.
    """

    def __init__(self, store: Store, known: History) -> None:
        self._store = store
        self._units = known_job.units(known, store)
        self.rows_each = self._units.rows_each
        self._starts = [unit.start * self.rows_each for unit in self._units]
        sizes = output_view.visible_parts(store)
        self._parts = {name for name, size in sizes.items() if size is not None}
        self._addresses = RowAddresses(known.files, self.rows_each)
        self._files = contextlib.ExitStack()
        self._unit: Unit | None = None
        self._part: pq.ParquetFile | None = None
        # Indices of the first row of each row group of the part, and of the row behind it.
        self._bounds: list[int] = []
        self._start = 0
        self._cells: list[pa.RecordBatch] = []

    def __enter__(self) -> "FolderRows":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self._files.close()

    def at(self, row: int, max_rows: int) -> Rows:
        """Rows from this one on, at least one and as many as are at hand.

        Raises:
            OutputConflictError: A part does not hold the rows that it should.
            StorageError: A part cannot be read.
        """
        unit = self._units[bisect.bisect_right(self._starts, row) - 1]
        if unit.part_name not in self._parts:
            stop = unit.stop * self.rows_each
            return Rows(num_rows=min(max_rows, stop - row), cells=None)
        try:
            self._seek(unit, row)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise _unreadable(self._store, unit, error) from None
        start = self._start
        for cells in self._cells:
            if row < start + len(cells):
                piece = cells.slice(row - start, max_rows)
                return Rows(num_rows=len(piece), cells=piece)
            start += len(cells)
        raise AssertionError(f"row {row} is in none of the row groups of {unit}")

    def _seek(self, unit: Unit, row: int) -> None:
        """Reads the row group that holds the row, if it is not at hand."""
        if unit != self._unit:
            self._open(unit)
        num_rows = sum(len(cells) for cells in self._cells)
        if self._start <= row < self._start + num_rows and self._cells:
            return
        assert self._part is not None, "a unit is set once its part is open"
        group = bisect.bisect_right(self._bounds, row) - 1
        self._start = self._bounds[group]
        self._cells = self._part.read_row_group(group, use_threads=False).to_batches()
        start = self._start
        for cells in self._cells:
            self._check(unit, start, cells)
            start += len(cells)

    def _open(self, unit: Unit) -> None:
        self._files.close()
        self._unit, self._cells = None, []
        file = self._files.enter_context(self._store.open(unit.part_name))
        part = self._files.enter_context(pq.ParquetFile(file, pre_buffer=False))
        groups = range(part.num_row_groups)
        lengths = [part.metadata.row_group(group).num_rows for group in groups]
        start = unit.start * self.rows_each
        self._bounds = [start + rows for rows in itertools.accumulate(lengths, initial=0)]
        if self._bounds[-1] != unit.stop * self.rows_each:
            raise self._not_its_rows(unit)
        self._unit, self._part = unit, part

    def _check(self, unit: Unit, start: int, cells: pa.RecordBatch) -> None:
        is_there = "row" in cells.schema.names
        if not is_there or self._addresses.first_wrong(start, cells["row"]) is not None:
            raise self._not_its_rows(unit)

    def _not_its_rows(self, unit: Unit) -> OutputConflictError:
        return OutputConflictError(
            f"{self._store.url}/{unit.part_name} does not hold the rows that it should; `jaxpaged "
            f"verify {self._store.url}` says what is wrong"
        )


def _unreadable(store: Store, unit: Unit, error: Exception) -> StorageError:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return StorageError(
        f"{store.url}/{unit.part_name}: cannot read this part: {reason}; `jaxpaged verify "
        f"{store.url}` says what is wrong"
    )
