"""Rows of the input plan as small record batches, in order and in bounded memory.

A batch never spans row groups or units and never holds more rows than can be decoded safely: a
footer may say 2 MB about 20 GB of text, so the number of rows comes from what a row can at most
be, not from what the footer says rows are together. Knows nothing of prompts.
"""

from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from jaxpaged.errors import InputSchemaError
from jaxpaged.job.input_plan import InputPlan, PlannedFile, RowGroup
from jaxpaged.job.row_batch import RowBatch
from jaxpaged.job.units import Unit

MAX_BATCH_ROWS = 128
MAX_BATCH_BYTES = 16 * 1024 * 1024

_BUFFER_BYTES = 64 * 1024
_FIXED_BYTES = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 12}
_OFFSET_BYTES = 8


def read(
    plan: InputPlan, columns: Sequence[str], units: Iterable[Unit]
) -> Generator[RowBatch, None, None]:
    """The rows of the units, in order.

    Args:
        plan: The input.
        columns: The columns to read.
        units: The wanted units in order; row groups without any of their rows are not read.

    Raises:
        InputSchemaError: A file changed since it was planned, or is broken; the message names
            file and row group.
    """
    wanted = _WantedRows(units)
    parquet: pq.ParquetFile | None = None
    opened: PlannedFile | None = None
    try:
        for group in plan.row_groups():
            if not wanted.begin_before(group.start + group.num_rows):
                continue
            if parquet is None or group.file is not opened:
                if parquet is not None:
                    parquet.close()
                parquet, opened = _open(group.file), group.file
            yield from _read_group(parquet, group, columns, wanted)
    finally:
        if parquet is not None:
            parquet.close()


class _WantedRows:
    """A cursor over the wanted units; asked for rows in order."""

    def __init__(self, units: Iterable[Unit]) -> None:
        self._units = iter(units)
        self._unit = next(self._units, None)

    def begin_before(self, row: int) -> bool:
        """Whether a wanted row lies before this one and was not passed yet."""
        return self._unit is not None and self._unit.start < row

    def pieces(self, start: int, stop: int) -> Iterator[tuple[Unit, int, int]]:
        """The wanted pieces of the rows [start, stop), one for each unit."""
        while self._unit is not None and self._unit.start < stop:
            unit = self._unit
            if max(start, unit.start) < min(stop, unit.stop):
                yield unit, max(start, unit.start), min(stop, unit.stop)
            if unit.stop > stop:
                return
            self._unit = next(self._units, None)


def _read_group(
    parquet: pq.ParquetFile, group: RowGroup, columns: Sequence[str], wanted: _WantedRows
) -> Iterator[RowBatch]:
    start = group.start
    end = group.start + group.num_rows
    try:
        for raw in parquet.iter_batches(
            batch_size=_batch_rows(parquet, group, columns),
            row_groups=[group.index],
            columns=list(columns),
            use_threads=False,
        ):
            for unit, first, stop in wanted.pieces(start, start + raw.num_rows):
                piece = raw.slice(first - start, stop - first)
                yield _row_batch(piece, columns, group=group, unit=unit, start=first)
            start += raw.num_rows
            if not wanted.begin_before(end):
                return
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise InputSchemaError(
            f"{group.file.path}: row group {group.index} is broken near its row "
            f"{start - group.start}: {reason}"
        ) from None
    if start != end:
        raise InputSchemaError(
            f"{group.file.path}: row group {group.index} has {start - group.start} rows, but the "
            f"file's footer says {group.num_rows}"
        )


def _row_batch(
    raw: pa.RecordBatch, columns: Sequence[str], *, group: RowGroup, unit: Unit, start: int
) -> RowBatch:
    cells, invalid = _without_invalid(_plain(raw, columns))
    return RowBatch(
        unit=unit,
        start=start,
        file=group.file.name,
        row_group=group.index,
        first_index=start - group.start,
        cells=cells,
        invalid=invalid,
    )


def _open(file: PlannedFile, dictionaries: list[str] | None = None) -> pq.ParquetFile:
    try:
        status = file.path.stat()
        if (status.st_size, status.st_mtime_ns) != (file.size, file.mtime_ns):
            raise InputSchemaError(f"{file.path}: changed while the job was running")
        return pq.ParquetFile(
            file.path,
            pre_buffer=False,
            buffer_size=_BUFFER_BYTES,
            memory_map=False,
            read_dictionary=dictionaries,
        )
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise InputSchemaError(f"{file.path}: cannot read it any more: {reason}") from None


def _batch_rows(parquet: pq.ParquetFile, group: RowGroup, columns: Sequence[str]) -> int:
    """How many rows can be decoded at once within `MAX_BATCH_BYTES`."""
    metadata = parquet.metadata.row_group(group.index)
    row_bytes = 0.0
    for leaf in range(metadata.num_columns):
        chunk = metadata.column(leaf)
        path = chunk.path_in_schema
        if not any(path == name or path.startswith(f"{name}.") for name in columns):
            continue
        values = max(1.0, chunk.num_values / max(1, group.num_rows))
        stored = chunk.total_uncompressed_size / max(1, group.num_rows)
        width = _FIXED_BYTES.get(chunk.physical_type)
        if width is None:
            width = _longest_entry(group, chunk, parquet.schema.column(leaf).length)
        row_bytes += max(stored, values * width)
    return max(1, min(MAX_BATCH_ROWS, int(MAX_BATCH_BYTES / max(1.0, row_bytes))))


def _longest_entry(group: RowGroup, chunk: pq.ColumnChunkMetaData, fixed_length: int) -> int:
    """The longest value of the chunk's dictionary, in bytes; a few bytes if it has none.

    Values outside a dictionary are stored one by one: their bytes are in the chunk's size.
    """
    if fixed_length > 0:
        return fixed_length
    if not any("DICTIONARY" in encoding for encoding in chunk.encodings):
        return _OFFSET_BYTES
    if chunk.total_uncompressed_size * MAX_BATCH_ROWS <= MAX_BATCH_BYTES:
        return max(_OFFSET_BYTES, chunk.total_uncompressed_size)
    path = chunk.path_in_schema
    with _open(group.file, [path]) as probe:
        first = next(
            probe.iter_batches(
                batch_size=1, row_groups=[group.index], columns=[path], use_threads=False
            )
        )
    return max(_OFFSET_BYTES, *(_longest(column) for column in first.columns))


def _longest(array: pa.Array) -> int:
    """The longest dictionary entry anywhere in a nested array, in bytes."""
    if pa.types.is_dictionary(array.type):
        return _call("max", _call("binary_length", array.dictionary)).as_py() or 0
    if pa.types.is_struct(array.type):
        return max((_longest(array.field(i)) for i in range(array.type.num_fields)), default=0)
    if pa.types.is_map(array.type):
        return max(_longest(array.keys), _longest(array.items))
    return _longest(array.values) if hasattr(array, "values") else 0


def _plain(batch: pa.RecordBatch, columns: Sequence[str]) -> pa.RecordBatch:
    """The batch with its columns in the asked order, as plain arrays.

    Dictionaries are decoded: a batch that is kept would otherwise keep the whole dictionary.
    """
    arrays = []
    for name in columns:
        array = batch.column(name)
        if isinstance(array, pa.ExtensionArray):
            array = array.storage
        if pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        # Arrow has few functions for views.
        if pa.types.is_string_view(array.type):
            array = array.cast(pa.large_string())
        if pa.types.is_binary_view(array.type):
            array = array.cast(pa.large_binary())
        arrays.append(array)
    # A batch without columns still has its rows.
    return pa.RecordBatch.from_arrays(arrays, names=list(columns)) if arrays else batch.select([])


def _without_invalid(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, dict[int, str]]:
    """The batch with cells that are not valid UTF-8 made null, and where they were."""
    arrays: list[pa.Array] = []
    invalid: dict[int, str] = {}
    for name, array in zip(batch.schema.names, batch.columns, strict=True):
        if not _is_valid(array):
            # Joined with a null each cell is a copy of its own: Arrow checks all that a slice of
            # a list shares. Joining also works for views inside lists and structs.
            null = pa.nulls(1, array.type)
            cells = [pa.concat_arrays([array.slice(i, 1), null])[:1] for i in range(len(array))]
            bad = {i for i, cell in enumerate(cells) if not _is_valid(cell)}
            invalid.update((i, name) for i in bad)
            array = pa.concat_arrays([null if i in bad else c for i, c in enumerate(cells)])
        arrays.append(array)
    if not invalid:
        return batch, invalid
    return pa.RecordBatch.from_arrays(arrays, names=batch.schema.names), invalid


def _is_valid(array: pa.Array) -> bool:
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _call(function: str, *arguments: object) -> Any:  # noqa: ANN401  (an array or a scalar)
    """One of Arrow's compute functions; pyarrow generates its own wrappers at import."""
    return pc.call_function(function, list(arguments))
