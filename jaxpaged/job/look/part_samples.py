"""Some completions of an output folder, read from its parts for people to look at."""

from collections.abc import Iterator
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from jaxpaged.errors import StorageError
from jaxpaged.job.counted_report import JobFolder
from jaxpaged.job.feeder import MAX_SAMPLES, Sample
from jaxpaged.job.output import output_view, row_addresses
from jaxpaged.job.prompt import prompts
from jaxpaged.job.result_columns import ROW_TYPE
from jaxpaged.job.spec import JobSpec

# Of the first part; where all of so many rows failed, there are no samples.
_MAX_ROWS = 256
_MAX_CHARS = 200


def samples(folder: JobFolder) -> tuple[Sample, ...]:
    """The first completions of the first part; none if it cannot be read."""
    names = output_view.visible_parts(folder.store)
    first = next((unit.part_name for unit in folder.units if unit.part_name in names), None)
    if first is None:
        return ()
    try:
        with folder.store.open(first) as file:
            return tuple(_samples(file, folder.spec))[:MAX_SAMPLES]
    except (pa.ArrowException, OSError, StorageError, ValueError):
        # What is wrong with a part is for `jaxpaged verify` to say.
        return ()


def _samples(file: BinaryIO, spec: JobSpec) -> Iterator[Sample]:
    with pq.ParquetFile(file, pre_buffer=False) as part:
        names = part.schema_arrow.names
        asked = ["prompt"] if spec.output.prompt else list(prompts.used_columns(spec.input, names))
        wanted = ["row", "completion", "completions", "sample", *asked]
        columns = [name for name in dict.fromkeys(wanted) if name in names]
        batches = part.iter_batches(batch_size=_MAX_ROWS, columns=columns, use_threads=False)
        for row in next(batches, pa.RecordBatch.from_pylist([])).to_pylist():
            completion = _completion(row)
            if completion is not None and not row.get("sample"):
                yield Sample(
                    row=row_addresses.describe(pa.scalar(row["row"], ROW_TYPE)),
                    preview="\n".join(str(row.get(name)) for name in asked)[:_MAX_CHARS],
                    completion=completion,
                )


def _completion(row: dict[str, Any]) -> str | None:
    """The text of a row's first completion."""
    if "completions" in row:
        return row["completions"][0]["text"] if row["completions"] else None
    return row.get("completion")
