"""The input as it was found: an ordered list of files with their contents, footers and row groups.

A row's place in the plan, its global index, counts rows over all files in order.
"""

import bisect
import collections
import dataclasses
import itertools
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

import pyarrow as pa

from jaxpaged.errors import InputSchemaError
from jaxpaged.job.input import file_content, input_files, parquet_footer
from jaxpaged.job.input.file_content import FileWatch
from jaxpaged.job.input.file_record import FileRecord
from jaxpaged.job.units import Unit
from jaxpaged.storage.files import SourceFiles

_NUM_THREADS = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFile:
    """One input file.

    Attributes:
        place: Where it lies: an absolute path or a URL.
        record: What it was like when it was planned.
    """

    place: str
    record: FileRecord

    @property
    def name(self) -> str:
        """Its path relative to the input's root; part of its rows' addresses."""
        return self.record.name

    @property
    def num_rows(self) -> int:
        """Rows of the file."""
        return self.record.num_rows


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputPlan:
    """All input files in the order of their rows.

    Attributes:
        files: The files.
        schemas: Every distinct schema, with extension types as their storage, and the name of
            the first file that has it; the first one counts.
        watch: Tells whether they changed since.
    """

    files: tuple[PlannedFile, ...]
    schemas: tuple[tuple[pa.Schema, str], ...]
    watch: FileWatch

    @cached_property
    def _starts(self) -> list[int]:
        """The global index of each file's first row."""
        lengths = [file.num_rows for file in self.files]
        return [0, *itertools.accumulate(lengths)][: len(lengths)]

    @property
    def source(self) -> SourceFiles:
        """Opens the files."""
        return self.watch.files

    @property
    def schema(self) -> pa.Schema:
        """The schema of the first file."""
        return self.schemas[0][0]

    @property
    def num_rows(self) -> int:
        """Rows of all files."""
        return sum(file.num_rows for file in self.files)

    @property
    def records(self) -> tuple[FileRecord, ...]:
        """What a later run has to know of the files."""
        return tuple(file.record for file in self.files)

    def row_groups(self) -> Iterator[RowGroup]:
        """All row groups, in order."""
        start = 0
        for file in self.files:
            lengths = (rows for rows, count in file.record.row_groups for _ in range(count))
            for index, num_rows in enumerate(lengths):
                yield RowGroup(file=file, index=index, start=start, num_rows=num_rows)
                start += num_rows

    def check_unchanged(self, unit: Unit) -> None:
        """Makes sure that a unit's rows came from the files that were planned.

        Raises:
            InputSchemaError: A file that has rows of the unit is gone, cannot be looked at, or is
                another one by now; the message names it.
        """
        # A job may have as many files as units: looking through all for each would take for ever.
        first = bisect.bisect_right(self._starts, unit.start) - 1
        for index in range(max(0, first), bisect.bisect_left(self._starts, unit.stop)):
            if self.files[index].num_rows:
                self.check_file(self.files[index])

    def check_file(self, file: PlannedFile) -> None:
        """Makes sure that a file is the one that was planned.

        Raises:
            InputSchemaError: It is not; the message names it.
        """
        try:
            if not self.watch.has_changed(file.place, file.record):
                return
        except OSError as error:
            raise file_content.vanished(file.place, error) from None
        raise file_content.changed(file.place)


def plan(
    paths: Sequence[str], *, files: SourceFiles, known: Sequence[FileRecord] = ()
) -> InputPlan:
    """The plan of the files that `paths` mean; reads footers, and all bytes of new files.

    Args:
        paths: Files, folders and globs.
        files: Where they are looked for.
        known: The files of an earlier run, in order. Those that are still there come first, in
            this order and with these names; their bytes are read only if they could have changed.

    Raises:
        ConfigError: Some of the paths are local and others are not.
        InputSchemaError: A file is missing, unreadable or no Parquet file, or names two of its
            columns alike.
    """
    records = {record.name: record for record in known}
    found = input_files.find(paths, files, list(records))
    names = [name for name in records if name in found]
    names += [name for name in found if name not in records]
    planned: list[PlannedFile] = []
    schemas: dict[pa.Schema, str] = {}
    for file, schema in _look_at_all({name: found[name] for name in names}, files, records):
        planned.append(file)
        if schema not in schemas:
            _check_unique_columns(schema, file.place)
            schemas[schema] = file.name
    return InputPlan(files=tuple(planned), schemas=tuple(schemas.items()), watch=FileWatch(files))


def _look_at_all(
    places: Mapping[str, str], files: SourceFiles, known: Mapping[str, FileRecord]
) -> Generator[tuple[PlannedFile, pa.Schema], None, None]:
    """The files in order; a few are read at a time, because hashing leaves Python's lock."""
    stop = threading.Event()
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        looks = collections.deque(
            threads.submit(_look_at, name, place, files, known=known.get(name), stop=stop)
            for name, place in places.items()
        )
        try:
            while looks:
                yield looks.popleft().result()
        finally:
            stop.set()
            threads.shutdown(cancel_futures=True)


def _look_at(
    name: str,
    place: str,
    files: SourceFiles,
    *,
    known: FileRecord | None,
    stop: threading.Event,
) -> tuple[PlannedFile, pa.Schema]:
    try:
        stat = files.stat(place)
        if stat.kind != "file":
            raise InputSchemaError(f"{place}: not a regular file; expected a Parquet file")
        with files.open(place) as file:
            footer = parquet_footer.read(file, stat.size, place)
            content = file_content.take(file, stat, known, stop=stop)
        if files.stat(place).stamp != stat.stamp:
            raise InputSchemaError(f"{place}: changed while it was read; run again once it is done")
    except OSError as error:
        raise file_content.unreadable(place, error) from None
    record = FileRecord(
        name=name,
        bytes=stat.size,
        content=content.text,
        footer=footer.sha256,
        row_groups=footer.row_groups,
        modified=stat.modified,
        stamp=stat.stamp,
        hashed_at=content.hashed_at,
    )
    return PlannedFile(place=place, record=record), footer.schema


def _check_unique_columns(schema: pa.Schema, place: str) -> None:
    for name, count in collections.Counter(schema.names).items():
        if count > 1:
            raise InputSchemaError(
                f"{place}: {count} columns are named {name!r}; rename all but one in the file"
            )
