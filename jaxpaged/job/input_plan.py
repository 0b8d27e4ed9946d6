"""The input as it was found: an ordered list of files with their sizes, footers and row groups.

Only footers are read. A row's place in the plan, its global index, counts rows over all files in
order.
"""

import collections
import dataclasses
import datetime
import hashlib
import itertools
import pathlib
import stat
from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from jaxpaged.errors import InputSchemaError
from jaxpaged.job import input_files

_MAGIC = b"PAR1"
_ENCRYPTED = b"PARE"
_TAIL = 8  # the footer's length and the magic bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFile:
    """One input file.

    Attributes:
        name: Its path relative to the input's root; part of its rows' addresses.
        path: Where it lies.
        size: Bytes.
        mtime_ns: When it was last modified.
        footer_sha256: Digest of its Parquet footer.
        row_groups: The rows of each row group.
    """

    name: str
    path: pathlib.Path
    size: int
    mtime_ns: int
    footer_sha256: str
    row_groups: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        """Rows of the file."""
        return sum(self.row_groups)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowGroup:
    """One row group in the plan.

    Attributes:
        file: Its file.
        index: Its index in the file.
        start: The global index of its first row.
        num_rows: Its rows.
    """

    file: PlannedFile
    index: int
    start: int
    num_rows: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InputPlan:
    """All input files in the order of their rows.

    Attributes:
        files: The files.
        schemas: Every distinct schema, with extension types as their storage, and the name of
            the first file that has it; the first one counts.
    """

    files: tuple[PlannedFile, ...]
    schemas: tuple[tuple[pa.Schema, str], ...]

    @property
    def schema(self) -> pa.Schema:
        """The schema of the first file."""
        return self.schemas[0][0]

    @property
    def num_rows(self) -> int:
        """Rows of all files."""
        return sum(file.num_rows for file in self.files)

    def row_groups(self) -> Iterator[RowGroup]:
        """All row groups, in order."""
        start = 0
        for file in self.files:
            for index, num_rows in enumerate(file.row_groups):
                yield RowGroup(file=file, index=index, start=start, num_rows=num_rows)
                start += num_rows

    def identity(self) -> dict[str, object]:
        """What must not change between two runs of a job, in JSON's types."""
        values: dict[str, object] = {"input files": [file.name for file in self.files]}
        for file in self.files:
            runs = itertools.groupby(file.row_groups)
            values |= {
                f"{file.name}: bytes": file.size,
                f"{file.name}: modified": _time_text(file.mtime_ns),
                f"{file.name}: footer": file.footer_sha256,
                f"{file.name}: rows, row groups": [[rows, len(list(run))] for rows, run in runs],
            }
        return values


def plan(paths: Sequence[str]) -> InputPlan:
    """The plan of the files that `paths` mean.

    Raises:
        InputSchemaError: A file is missing, unreadable or no Parquet file, or names two of its
            columns alike.
    """
    files: list[PlannedFile] = []
    schemas: dict[pa.Schema, str] = {}
    for name, path in input_files.find(paths):
        file, schema = _read_footer(name, path)
        files.append(file)
        if schema not in schemas:
            _check_unique_columns(schema, path)
            schemas[schema] = name
    return InputPlan(files=tuple(files), schemas=tuple(schemas.items()))


def _read_footer(name: str, path: pathlib.Path) -> tuple[PlannedFile, pa.Schema]:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise InputSchemaError(f"{path}: not a regular file; expected a Parquet file")
        digest = _footer_digest(path, status.st_size)
        with pq.ParquetFile(path, pre_buffer=False, memory_map=False) as parquet:
            metadata = parquet.metadata
            groups = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
            schema = _storage_schema(parquet.schema_arrow)
    except (pa.ArrowException, OSError) as error:
        reason = str(getattr(error, "strerror", None) or error).splitlines()[0]
        raise InputSchemaError(f"{path}: cannot read it as Parquet: {reason}") from None
    file = PlannedFile(
        name=name,
        path=path,
        size=status.st_size,
        mtime_ns=status.st_mtime_ns,
        footer_sha256=digest,
        row_groups=tuple(groups),
    )
    return file, schema


def _footer_digest(path: pathlib.Path, size: int) -> str:
    with path.open("rb") as file:
        file.seek(max(0, size - _TAIL))
        tail = file.read(_TAIL)
        length = int.from_bytes(tail[:4], "little")
        if tail[4:] == _ENCRYPTED:
            raise InputSchemaError(f"{path}: encrypted Parquet files are not supported")
        if tail[4:] != _MAGIC or length + _TAIL > size:
            raise InputSchemaError(
                f"{path}: not a Parquet file, or one that was cut off ({size:,} bytes that do not "
                "end in a Parquet footer)"
            )
        file.seek(size - _TAIL - length)
        return hashlib.sha256(file.read(length)).hexdigest()


def _storage_schema(schema: pa.Schema) -> pa.Schema:
    """The schema as it is read: extension types as their storage, no metadata, all nullable."""
    types = [
        field.type.storage_type if isinstance(field.type, pa.BaseExtensionType) else field.type
        for field in schema
    ]
    return pa.schema(list(zip(schema.names, types, strict=True)))


def _check_unique_columns(schema: pa.Schema, path: pathlib.Path) -> None:
    for name, count in collections.Counter(schema.names).items():
        if count > 1:
            raise InputSchemaError(
                f"{path}: {count} columns are named {name!r}; rename all but one in the file"
            )


def _time_text(time_ns: int) -> str:
    seconds, nanoseconds = divmod(time_ns, 1_000_000_000)
    moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{nanoseconds:09d}Z"
