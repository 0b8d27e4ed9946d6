"""Rows of the input plan as small record batches, in order and in bounded memory.

A batch never spans row groups or units and never holds more rows than can be decoded safely: a
footer may say 2 MB about 20 GB of text, so the number of rows comes from what a row can at most
be, not from what the footer says rows are together. Knows nothing of prompts.
"""

import contextlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from jaxpaged.errors import InputSchemaError
from jaxpaged.job.input import cells, file_content
from jaxpaged.job.input.input_plan import InputPlan, PlannedFile, RowGroup
from jaxpaged.job.input.row_batch import RowBatch
from jaxpaged.job.units import Unit
from jaxpaged.storage.files import is_remote

MAX_BATCH_ROWS = 128
MAX_BATCH_BYTES = 16 * 1024 * 1024

_BUFFER_BYTES = 64 * 1024
# Of a remote file a request should bring more, as long as all columns together stay small.
_REMOTE_BUFFER_BYTES = 1024 * 1024
_ALL_BUFFERS_BYTES = 16 * 1024 * 1024
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
    with contextlib.ExitStack() as opened:
        parquet: pq.ParquetFile | None = None
        file: PlannedFile | None = None
        for group in plan.row_groups():
            if not wanted.begin_before(group.start + group.num_rows):
                continue
            if parquet is None or group.file is not file:
                opened.close()
                file = group.file
                parquet = opened.enter_context(_open(plan, file, columns))
            yield from _read_group(parquet, group, columns, wanted=wanted, plan=plan)


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
    parquet: pq.ParquetFile,
    group: RowGroup,
    columns: Sequence[str],
    *,
    wanted: _WantedRows,
    plan: InputPlan,
) -> Iterator[RowBatch]:
    start = group.start
    end = group.start + group.num_rows
    place = f"{group.file.place}: row group {group.index}"
    try:
        for raw in parquet.iter_batches(
            batch_size=_batch_rows(parquet, group, columns, plan=plan),
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
    except (pa.ArrowException, OSError, InputSchemaError) as error:
        # A file that changed while it was open reads like a broken one.
        plan.check_file(group.file)
        if isinstance(error, InputSchemaError):
            raise
        raise InputSchemaError(
            f"{place} is broken near its row {start - group.start}: {file_content.reason(error)}"
        ) from None
    if start != end:
        plan.check_file(group.file)
        raise InputSchemaError(
            f"{place} has {start - group.start} rows, but the file's footer says {group.num_rows}"
        )


def _row_batch(
    raw: pa.RecordBatch, columns: Sequence[str], *, group: RowGroup, unit: Unit, start: int
) -> RowBatch:
    plain, invalid = cells.without_invalid(cells.plain(raw, columns))
    return RowBatch(
        unit=unit,
        start=start,
        file=group.file.name,
        row_group=group.index,
        first_index=start - group.start,
        cells=plain,
        invalid=invalid,
    )


@contextlib.contextmanager
def _open(
    plan: InputPlan,
    file: PlannedFile,
    columns: Sequence[str],
    dictionaries: list[str] | None = None,
) -> Iterator[pq.ParquetFile]:
    buffer = _BUFFER_BYTES
    if is_remote(file.place):
        share = _ALL_BUFFERS_BYTES // max(1, len(columns))
        buffer = max(buffer, min(share, _REMOTE_BUFFER_BYTES))
    with contextlib.ExitStack() as opened:
        try:
            handle = opened.enter_context(plan.source.open(file.place))
            # Only now: what was opened before the look is what was looked at.
            plan.check_file(file)
            parquet = pq.ParquetFile(
                handle,
                pre_buffer=False,
                buffer_size=buffer,
                memory_map=False,
                read_dictionary=dictionaries,
            )
        except (pa.ArrowException, OSError) as error:
            raise file_content.vanished(file.place, error) from None
        yield opened.enter_context(parquet)


def _batch_rows(
    parquet: pq.ParquetFile, group: RowGroup, columns: Sequence[str], *, plan: InputPlan
) -> int:
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
            length = parquet.schema.column(leaf).length
            width = length if length > 0 else _longest_entry(group, chunk, plan)
        row_bytes += max(stored, values * width)
    return max(1, min(MAX_BATCH_ROWS, int(MAX_BATCH_BYTES / max(1.0, row_bytes))))


def _longest_entry(group: RowGroup, chunk: pq.ColumnChunkMetaData, plan: InputPlan) -> int:
    """The longest value of the chunk's dictionary, in bytes; a few bytes if it has none.

    Values outside a dictionary are stored one by one: their bytes are in the chunk's size.
    """
    if not any("DICTIONARY" in encoding for encoding in chunk.encodings):
        return _OFFSET_BYTES
    if chunk.total_uncompressed_size * MAX_BATCH_ROWS <= MAX_BATCH_BYTES:
        return max(_OFFSET_BYTES, chunk.total_uncompressed_size)
    path = chunk.path_in_schema
    with _open(plan, group.file, [path], dictionaries=[path]) as probe:
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


def _call(function: str, *arguments: object) -> Any:  # noqa: ANN401  (an array or a scalar)
    """One of Arrow's compute functions; pyarrow generates its own wrappers at import."""
    return pc.call_function(function, list(arguments))
