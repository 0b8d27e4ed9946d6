"""The addresses of an output's rows by their global indices, from the records of the input files.

Looks at neither the input nor the output.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jaxpaged.job.input.file_record import FileRecord
from jaxpaged.job.result_columns import ROW_TYPE


class RowAddresses:
    """Addresses by global index.

    Args:
        files: The input files in the order of their rows.
        rows_each: Consecutive rows of the output for each row of them.
    """

    def __init__(self, files: Sequence[FileRecord], rows_each: int = 1) -> None:
        self._rows_each = rows_each
        # One entry for each run of row groups of the same length.
        starts, places, first_groups, lengths = [], [], [], []
        start = 0
        for place, file in enumerate(files):
            group = 0
            for num_rows, count in file.row_groups:
                if num_rows:
                    starts.append(start)
                    places.append(place)
                    first_groups.append(group)
                    lengths.append(num_rows)
                start += num_rows * count
                group += count
        self._starts = np.array(starts, np.int64)
        self._places = np.array(places, np.int64)
        self._first_groups = np.array(first_groups, np.int64)
        self._lengths = np.array(lengths, np.int64)
        self._names = pa.array([file.name for file in files], pa.string())

    def of(self, start: int, stop: int) -> pa.StructArray:
        """The addresses of the rows [start, stop)."""
        rows = np.arange(start, stop) // self._rows_each
        run = np.searchsorted(self._starts, rows, side="right") - 1
        groups, indices = np.divmod(rows - self._starts[run], self._lengths[run])
        columns = [
            self._names.take(pa.array(self._places[run])),
            pa.array(groups + self._first_groups[run]).cast(ROW_TYPE.field("row_group").type),
            pa.array(indices).cast(ROW_TYPE.field("index").type),
        ]
        return pa.StructArray.from_arrays(columns, fields=list(ROW_TYPE))

    def first_wrong(self, start: int, found: pa.Array) -> int | None:
        """Which of the found addresses is the first that is not that of its row.

        Args:
            start: The global index of the first row.
            found: Addresses as they stand in an output, in order.
        """
        expected = self.of(start, start + len(found))
        if str(found.type) != str(expected.type):
            return 0 if len(found) else None
        is_right = np.ones(len(found), np.bool_)
        for mine, theirs in zip(expected.flatten(), found.flatten(), strict=True):
            equal = pc.call_function("equal", [mine, theirs])
            is_right &= equal.fill_null(False).to_numpy(zero_copy_only=False)
        return None if is_right.all() else int(is_right.argmin())


def describe(address: pa.StructScalar) -> str:
    """An address for people."""
    row = address.as_py() or {}
    return f"{row.get('file')}, row group {row.get('row_group')}, row {row.get('index')}"
