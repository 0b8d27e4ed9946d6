"""An output folder of a job of five rows in three parts, written without an engine."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator

import pyarrow as pa

from jaxpaged.job import result_columns
from jaxpaged.job.input.file_record import FileRecord
from jaxpaged.job.output import history, output_view, part_file
from jaxpaged.job.output.attempt import Attempt
from jaxpaged.job.output.history import History
from jaxpaged.job.output.output_folder import OutputFolder
from jaxpaged.job.output.output_view import PRIVATE
from jaxpaged.job.output.writer import PartWriter
from jaxpaged.job.units import Unit, Units
from jaxpaged.storage.disk import Disk
from jaxpaged.storage.local_store import LocalStore
from jaxpaged.storage.store import Store

SCHEMA = pa.schema([("id", pa.int64()), *result_columns.RESULT_FIELDS])


def file_record(name: str, num_rows: int) -> FileRecord:
    return FileRecord(
        name=name,
        bytes=100,
        content=f"sha256:{'a' * 64}",
        footer="b" * 64,
        row_groups=((num_rows, 1),),
        modified="",
        stamp="",
        hashed_at=0,
    )


def job_of(seed: int) -> History:
    """A job of five rows."""
    record = history.job_record(
        result_keys={"seed": seed},
        run_keys={},
        model={},
        files=[file_record("a", 5)],
        schema=part_file.columns(SCHEMA),
    )
    return History(job=record)


KNOWN = job_of(seed=0)
UNITS = Units(segments=KNOWN.segments, rows_per_part=2)
NAMES = [unit.part_name for unit in UNITS]
RETRIED = KNOWN.followed_by(
    KNOWN.retry(where="id = 0 or id = 3", settings={}, units=[0, 1], rows=2)
)


def retried(index: int) -> Unit:
    """A unit as the retry makes it."""
    fingerprint = RETRIED.fingerprint
    return dataclasses.replace(UNITS[index], revision=1, fingerprint=fingerprint)


def table(unit: Unit) -> pa.Table:
    """A unit's rows, which say by which revision they were made; the first of a job has failed."""
    ids = range(unit.start, unit.stop)
    values = dict.fromkeys(SCHEMA.names) | {
        "id": 0,
        "finish_reason": "stop",
        "completion": f"by revision {unit.revision}",
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "cached_tokens": 0,
        "ends_in_partial_character": False,
    }
    failed = {"finish_reason": "error", "error_code": "bad_type", "completion": None}
    address = {"file": "a", "row_group": 0}
    found = [
        values | (failed if i == 0 else {}) | {"id": i, "row": address | {"index": i}} for i in ids
    ]
    return pa.Table.from_pylist(found, schema=SCHEMA)


def local(path: pathlib.Path, disk: Disk | None = None) -> LocalStore:
    return LocalStore(path, private=PRIVATE, durability="process", disk=disk)


@contextlib.contextmanager
def writing(store: Store, wanted: History = KNOWN) -> Iterator[OutputFolder]:
    """The folder, claimed for a history."""
    seen = history.read(store) if output_view.has_results(store) else None
    with (
        Attempt(store) as attempt,
        OutputFolder(store, attempt, schema=SCHEMA, scoring=None) as folder,
    ):
        folder.claim(seen, wanted)
        yield folder


def write(folder: OutputFolder, unit: Unit) -> None:
    with PartWriter(folder) as writer:
        assert writer.write(unit, table(unit))
        writer.commit(unit)


def finish(folder: OutputFolder, units: list[Unit], known: History = KNOWN) -> None:
    for unit in units:
        write(folder, unit)
    folder.finish(known, {"rows": 5})
