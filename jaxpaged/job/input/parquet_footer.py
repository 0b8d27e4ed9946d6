"""What a Parquet file says about itself: its footer's digest, row groups and schema.

Reads nothing but the footer.
"""

import dataclasses
import hashlib
import itertools

import pyarrow as pa
import pyarrow.parquet as pq

from jaxpaged.errors import InputSchemaError
from jaxpaged.job.input import file_content
from jaxpaged.storage.files import OpenFile

_MAGIC = b"PAR1"
_ENCRYPTED = b"PARE"
_TAIL = 8  # the footer's length and the magic bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Footer:
    """A Parquet file's footer.

    Attributes:
        sha256: Its digest.
        row_groups: Runs of row groups of the same length: rows of each, and how many there are.
        schema: The columns as they are read: extension types as their storage, no metadata, all
            nullable.
    """

    sha256: str
    row_groups: tuple[tuple[int, int], ...]
    schema: pa.Schema


def read(file: OpenFile, size: int, place: str) -> Footer:
    """The footer of an open file.

    Raises:
        InputSchemaError: It is no Parquet file, or a damaged one; the message names its place.
        OSError: It cannot be read.
    """
    digest = _digest(file, size, place)
    try:
        with pq.ParquetFile(file, pre_buffer=False, memory_map=False) as parquet:
            metadata = parquet.metadata
            rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
            schema = _storage_schema(parquet.schema_arrow)
    except pa.ArrowException as error:
        raise file_content.unreadable(place, error) from None
    if min(rows, default=0) < 0:
        raise InputSchemaError(f"{place}: a row group has {min(rows):,} rows; the file is damaged")
    runs = tuple((count, len(list(run))) for count, run in itertools.groupby(rows))
    return Footer(sha256=digest, row_groups=runs, schema=schema)


def _digest(file: OpenFile, size: int, place: str) -> str:
    file.seek(max(0, size - _TAIL))
    tail = file.read(_TAIL) or b""
    length = int.from_bytes(tail[:4], "little")
    if tail[4:] == _ENCRYPTED:
        raise InputSchemaError(f"{place}: encrypted Parquet files are not supported")
    if tail[4:] != _MAGIC or length + _TAIL > size:
        raise InputSchemaError(
            f"{place}: not a Parquet file, or one that was cut off ({size:,} bytes that do not "
            "end in a Parquet footer)"
        )
    file.seek(size - _TAIL - length)
    return hashlib.sha256(file.read(length) or b"").hexdigest()


def _storage_schema(schema: pa.Schema) -> pa.Schema:
    types = [
        field.type.storage_type if isinstance(field.type, pa.BaseExtensionType) else field.type
        for field in schema
    ]
    return pa.schema(list(zip(schema.names, types, strict=True)))
