"""Tables of finished rows to part files.

One part is open at a time, because rows arrive in input order. Knows nothing of what the rows are;
the folder decides when a part becomes visible.
"""

import contextlib
import types

import pyarrow as pa
import pyarrow.parquet as pq

from jaxpaged.job import output_folder
from jaxpaged.job.output_folder import OutputFolder
from jaxpaged.job.units import Unit

_COMPRESSION = "zstd"


class PartWriter:
    """Writes units one after the other; use it in a `with` statement.

    Args:
        folder: Where the parts appear.
        schema: Of every part.
    """

    def __init__(self, folder: OutputFolder, schema: pa.Schema) -> None:
        self._folder = folder
        self._schema = schema
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

    def write(self, unit: Unit, table: pa.Table) -> None:
        """Appends the next rows of a unit, as one row group; publishes the part with the last one.

        Raises:
            JobError: The disk is full or the folder cannot be written to.
        """
        with output_folder.writing(self._folder.path):
            if self._open is None:
                aside = self._folder.aside(unit.part_name)
                self._open = pq.ParquetWriter(aside, self._schema, compression=_COMPRESSION)
                self._num_written = 0
            self._open.write_table(table)
            self._num_written += table.num_rows
            if self._num_written < unit.num_rows:
                return
            self._close()
        self._folder.publish_part(unit.part_name, unit.num_rows, self._schema)

    def _close(self) -> None:
        if self._open is not None:
            writer, self._open = self._open, None
            writer.close()
