"""The rows that a retry leaves as they are: which ones, and their cells, from the parts before it.

Holds one part's rows in memory at a time, and a flag for each row of the units in flight.
"""

import bisect
import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jaxpaged.errors import StorageError
from jaxpaged.job.filter.row_filter import RowFilter
from jaxpaged.job.units import Unit
from jaxpaged.storage.store import Store


def count_chosen(store: Store, units: Iterable[Unit], chosen: RowFilter) -> dict[int, int]:
    """By unit, how many of its rows are chosen; units without any are left out.

    A row of the input is chosen if any row of the part that it gave is.

    Raises:
        StorageError: A part cannot be read, or does not hold the rows that it should.
    """
    counts = {unit.index: int(_chosen(store, unit, chosen).sum()) for unit in units}
    return {index: count for index, count in counts.items() if count}


class ParentRows:
    """The rows of finished parts, as a retry sees them.

    Args:
        store: The output.
        units: The units whose parts are replaced, in order.
        chosen: Which of their rows are completed again.
    """

    def __init__(self, store: Store, units: Sequence[Unit], chosen: RowFilter) -> None:
        self._store = store
        self._units = units
        self._starts = [unit.start for unit in units]
        self._filter = chosen
        self._chosen: dict[Unit, np.ndarray] = {}
        self._open: tuple[Unit, pa.Table] | None = None

    def is_kept(self, row: int) -> bool:
        """Whether the row with this global index, one of the units', stays as it is."""
        unit = self._units[bisect.bisect_right(self._starts, row) - 1]
        if unit not in self._chosen:
            self._chosen[unit] = _chosen(self._store, unit, self._filter)
        return not self._chosen[unit][row - unit.start]

    def merged(self, unit: Unit, start: int, table: pa.Table) -> pa.Table:
        """The part's rows from `start` on: the chosen ones of the table, the others as they were.

        Args:
            unit: The unit.
            start: The global index of a row of the input.
            table: What that row and those behind it gave.

        Raises:
            StorageError: The part cannot be read.
        """
        num_rows, each = table.num_rows, unit.rows_each
        first = start - unit.start
        chosen = np.repeat(self._chosen[unit][first : first + num_rows // each], each)
        before = self._rows(unit).slice(first * each, num_rows).cast(table.schema)
        # By runs of rows: Arrow cannot pick single rows of every type.
        edges = [0, *(np.flatnonzero(np.diff(chosen)) + 1).tolist(), num_rows]
        return pa.concat_tables(
            (table if chosen[begin] else before).slice(begin, end - begin)
            for begin, end in itertools.pairwise(edges)
        )

    def forget(self, unit: Unit) -> None:
        """Forgets a unit; to be called once it is committed."""
        self._chosen.pop(unit, None)
        self._open = None

    def _rows(self, unit: Unit) -> pa.Table:
        if self._open is None or self._open[0] != unit:
            self._open = (unit, _read(self._store, unit, None))
        return self._open[1]


def _chosen(store: Store, unit: Unit, chosen: RowFilter) -> np.ndarray:
    mask = chosen.mask(_read(store, unit, list(chosen.columns)))
    if len(mask) != unit.num_part_rows:
        raise StorageError(
            f"{store.url}/{unit.part_name} has {len(mask):,} rows, not {unit.num_part_rows:,}; "
            "`jaxpaged verify` looks closer"
        )
    return np.logical_or.reduce(mask.reshape(-1, unit.rows_each), axis=1)


def _read(store: Store, unit: Unit, columns: list[str] | None) -> pa.Table:
    try:
        with store.open(unit.part_name) as file:
            table = pq.ParquetFile(file, pre_buffer=False).read(columns=columns)
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise StorageError(
            f"{store.url}/{unit.part_name}: cannot read this part: {reason}; `jaxpaged verify` "
            "looks closer"
        ) from None
    return table.replace_schema_metadata(None)
