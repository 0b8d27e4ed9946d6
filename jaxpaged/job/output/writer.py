"""Tables of finished rows to part files.

One part is open at a time, because rows arrive in input order. Knows nothing of what the rows are;
the folder decides when a part is committed.
"""

import contextlib
import types

import pyarrow as pa
import pyarrow.parquet as pq

from jaxpaged.job.output import part_file
from jaxpaged.job.output.output_folder import OutputFolder
from jaxpaged.job.tally import Tally
from jaxpaged.job.units import Unit
from jaxpaged.storage.local_store import write_error


class PartWriter:
    """Writes units one after the other; use it in a `with` statement.

    Args:
        folder: Where the parts are committed.
    """

    def __init__(self, folder: OutputFolder) -> None:
        self._folder = folder
        self._open: pq.ParquetWriter | None = None
        self._num_written = 0

    def __enter__(self) -> "PartWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        # A part that is not finished stays aside, where the folder removes it; on a full disk even
        # closing it fails.
        with contextlib.suppress(OSError):
            self._close()

    def write(self, unit: Unit, table: pa.Table) -> bool:
        """Appends the next rows of a unit, as one row group; returns whether they are the last.

        Raises:
            StorageError: The disk is full or the folder cannot be written to.
        """
        scratch = self._folder.store.scratch(unit.part_name)
        try:
            if self._open is None:
                self._open = part_file.open_writer(str(scratch), self._folder.schema)
                self._num_written = 0
            self._open.write_table(table)
            self._num_written += table.num_rows
            if self._num_written < unit.num_part_rows:
                return False
            part_file.add_metadata(self._open, unit, self._folder.attempt.number)
            self._close()
        except OSError as error:
            raise write_error(error, str(scratch)) from None
        return True

    def commit(self, unit: Unit) -> Tally:
        """Commits the unit that was written last; returns what its rows come to.

        Raises:
            OutputConflictError: This process is not the writer any more.
            StorageError: The part cannot be written, or does not read as what was written.
        """
        return self._folder.commit(unit)

    def _close(self) -> None:
        if self._open is not None:
            writer, self._open = self._open, None
            writer.close()
