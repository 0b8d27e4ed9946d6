"""One part file: what it says of itself, and whether all of it reads as what it says.

Knows Parquet and units; where the file lies and whether it is committed is not its business.
"""

import hashlib
import io
import json
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from jaxpaged.job.units import Unit

Columns = tuple[tuple[str, str], ...]
"""Name and type of each column, in order."""

_KEY = b"jaxpaged"
_CHUNK_BYTES = 1024 * 1024
_COMPRESSION = "zstd"


class PartProblem(Exception):
    """A part is not what it should be; the text says how."""


class ForeignPart(PartProblem):
    """A part that reads, and is another job's or nobody's."""


def open_writer(where: str, schema: pa.Schema) -> pq.ParquetWriter:
    """A writer of a part; pages carry checksums, so that a reader sees every flipped bit."""
    return pq.ParquetWriter(where, schema, compression=_COMPRESSION, write_page_checksum=True)


def add_metadata(writer: pq.ParquetWriter, unit: Unit, attempt: int) -> None:
    """Writes into the part whose it is; call before the writer is closed."""
    writer.add_key_value_metadata({_KEY.decode(): json.dumps(_claim(unit) | {"attempt": attempt})})


def revision_of(file: BinaryIO) -> int | None:
    """The revision a part says it was made by; None if it says nothing or is no part.

    Raises:
        OSError: It cannot be read.
    """
    try:
        metadata = pq.read_metadata(file).metadata or {}
        revision = json.loads(metadata[_KEY])["revision"]
    except (pa.ArrowException, KeyError, TypeError, ValueError, RecursionError):
        return None
    except OSError as error:
        if error.errno is None:
            return None
        raise
    return revision if isinstance(revision, int) else None


def columns(schema: pa.Schema) -> Columns:
    """Name and type of each column as a part of this schema reads, which records keep.

    Parquet gives some types back with other names inside: list<element> for list<item>.
    """
    stored = io.BytesIO()
    pq.write_table(schema.empty_table(), stored)
    return _columns(pq.read_schema(stored))


def check(file: BinaryIO, unit: Unit, expected: Columns) -> int:
    """Reads all of a part; returns the attempt that made it.

    Raises:
        ForeignPart: It is another job's, or another unit's.
        PartProblem: It does not read, or has other columns than expected.
        OSError: The disk cannot be read.
    """
    try:
        with pq.ParquetFile(file, page_checksum_verification=True, pre_buffer=False) as part:
            claim = _read_claim(part.metadata)
            attempt = claim.pop("attempt", None)
            if claim != _claim(unit) or not isinstance(attempt, int):
                raise ForeignPart(
                    f"it says it is {_describe(claim)}, not {_describe(_claim(unit))}"
                )
            found = _columns(part.schema_arrow)
            if found != expected:
                raise PartProblem(f"its columns are {_listed(found)}, not {_listed(expected)}")
            num_rows = sum(len(batch) for batch in part.iter_batches(use_threads=False))
    except (pa.ArrowException, ValueError) as error:
        raise PartProblem(f"it does not read as Parquet: {_first_line(error)}") from None
    except OSError as error:
        # Parquet too raises OSError, without a number, for what makes no sense.
        if error.errno is not None:
            raise
        raise PartProblem(f"it does not read as Parquet: {_first_line(error)}") from None
    if num_rows != unit.num_part_rows:
        raise PartProblem(f"it has {num_rows:,} rows, not {unit.num_part_rows:,}")
    return attempt


def sha256(file: BinaryIO) -> str:
    """Digest of all bytes of a file, from its beginning."""
    file.seek(0)
    digest = hashlib.sha256()
    while chunk := file.read(_CHUNK_BYTES):
        digest.update(chunk)
    return digest.hexdigest()


def _claim(unit: Unit) -> dict[str, object]:
    return {
        "unit": unit.index,
        "start": unit.start,
        "stop": unit.stop,
        "revision": unit.revision,
        "fingerprint": unit.fingerprint,
    }


def _read_claim(metadata: pq.FileMetaData) -> dict[str, object]:
    try:
        claim = json.loads((metadata.metadata or {})[_KEY])
    except (KeyError, ValueError, RecursionError):
        return {}
    return claim if isinstance(claim, dict) else {}


def _describe(claim: dict[str, object]) -> str:
    if not claim:
        return "no part of jaxpaged's"
    return (
        f"unit {claim.get('unit')}, rows {claim.get('start')} to {claim.get('stop')}, revision "
        f"{claim.get('revision')} of job {str(claim.get('fingerprint'))[:12]}"
    )


def _columns(schema: pa.Schema) -> Columns:
    return tuple((field.name, str(field.type)) for field in schema)


def _listed(columns: Columns) -> str:
    return ", ".join(f"{name}: {kind}" for name, kind in columns)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
