"""The output folder: whose it is, what in it is finished, and how things become visible in it.

    out/
      part-000000.parquet ...   finished parts, the only names that readers of the folder see
      _SUCCESS                  written last: a summary of the finished job
      _jaxpaged/
        job.json                the job's identity; the folder belongs to that job
        report.json             the report of the last run
        lock                    held while a process writes here
        tmp/                    what is not finished yet

Everything is written aside, flushed to the disk and renamed: at every moment the folder reads as a
table in which no row occurs twice.
"""

import fcntl
import json
import os
import pathlib
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import IO

import pyarrow as pa
import pyarrow.parquet as pq

from jaxpaged.errors import ConfigError, IdentityError, JobError, OutputConflictError
from jaxpaged.job import identity
from jaxpaged.job.units import Units

REPORT = "_jaxpaged/report.json"
"""Where the report lies in the folder; a visible name would break readers of the folder."""

_OURS = "_jaxpaged"
_SUCCESS = "_SUCCESS"
_SIZES = "part_bytes"
_HIDDEN = ("_", ".")
_SHOWN = 10


def is_finished(path: pathlib.Path, job: Mapping[str, object], units: Units) -> bool:
    """Whether the folder holds all parts of this very job; looks only, changes nothing.

    Args:
        path: The folder; it may be missing.
        job: This job's record; see `identity.record`.
        units: This job's units.

    Raises:
        OutputConflictError: Something that is not ours is in the way.
        IdentityError: The folder holds parts of a job that differs; the message lists how.
    """
    _check_ours(path)
    names = _part_names(path)
    if not names:
        return False
    _check_identity(path, job, len(names))
    wanted = {unit.part_name for unit in units}
    foreign = sorted(names - wanted)
    if foreign:
        raise OutputConflictError(
            f"output.path: {path / foreign[0]} is no part of this job; move it elsewhere, or "
            "choose another folder"
        )
    summary = _read_json(path / _SUCCESS)
    return names == wanted and summary is not None and summary.get(_SIZES) == _part_sizes(path)


def read_report(path: pathlib.Path) -> dict[str, object] | None:
    """The report of the last run in the folder; None if there is none that can be read."""
    return _read_json(path / REPORT)


class OutputFolder:
    """A folder that this process alone writes to; use it in a `with` statement.

    Args:
        path: The folder; created if it is missing.

    Raises:
        ConfigError: The folder cannot be made or written to.
        OutputConflictError: Not a folder, not ours, or another process writes to it.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self._tmp = path / _OURS / "tmp"
        _check_ours(path)
        try:
            self._tmp.mkdir(parents=True, exist_ok=True)
            self._lock: IO[bytes] = (path / _OURS / "lock").open("ab")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise OutputConflictError(
                f"output.path: another process is writing to {path}; wait until it has ended, or "
                "choose another folder"
            ) from None
        except OSError as error:
            raise ConfigError(f"output.path: cannot write to {path}: {error.strerror}") from None

    def __enter__(self) -> "OutputFolder":
        try:
            self._clear_tmp()
        except JobError:
            self._lock.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        try:
            self._clear_tmp()
        finally:
            self._lock.close()

    def claim(self, job: Mapping[str, object], units: Units) -> None:
        """Makes the folder this job's, unless it already holds parts of it.

        A folder without parts is claimed anew: there is nothing in it to mix with.

        Raises:
            IdentityError: It holds parts of a job that differs.
            OutputConflictError: It holds Parquet files that are not this job's.
        """
        is_finished(self.path, job, units)
        if not _part_names(self.path):
            self._replace(self.path / _OURS / "job.json", job)
        # From here on the folder changes.
        with writing(self.path):
            (self.path / _SUCCESS).unlink(missing_ok=True)

    def finished_units(self, units: Units, schema: pa.Schema) -> tuple[set[int], list[str]]:
        """The indices of the units whose part is whole; the names of the others, now removed.

        Raises:
            JobError: A part cannot be read, so that nobody knows whether it is whole.
        """
        finished: set[int] = set()
        removed: list[str] = []
        names = _part_names(self.path)
        for unit in units:
            if unit.part_name in names:
                path = self.path / unit.part_name
                if _is_whole(path, unit.num_rows, schema):
                    finished.add(unit.index)
                else:
                    with writing(self.path):
                        path.unlink()
                    removed.append(unit.part_name)
        return finished, removed

    def aside(self, name: str) -> pathlib.Path:
        """Where a part is written until it is whole."""
        return self._tmp / name

    def publish_part(self, name: str, num_rows: int, schema: pa.Schema) -> None:
        """Makes the part written aside under this name visible, once it has proved whole.

        Raises:
            JobError: It could not be written, or does not read as what was written.
        """
        if not _is_whole(self.aside(name), num_rows, schema):
            raise JobError(
                f"{self.aside(name)}: does not read back as it was written; is the disk sound?"
            )
        with writing(self.path):
            self._publish(self.aside(name), self.path / name)

    def write_report(self, report: Mapping[str, object]) -> None:
        """Replaces the report."""
        self._replace(self.path / REPORT, report)

    def finish(self, summary: Mapping[str, object]) -> None:
        """Marks the job as finished, with the sizes of its parts: the last thing written."""
        self._replace(self.path / _SUCCESS, {**summary, _SIZES: _part_sizes(self.path)})

    def _replace(self, path: pathlib.Path, content: Mapping[str, object]) -> None:
        """Writes a JSON file; at every moment there is the old one or the new one."""
        with writing(self.path):
            aside = self.aside(path.name)
            aside.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
            self._publish(aside, path)

    def _publish(self, aside: pathlib.Path, path: pathlib.Path) -> None:
        _flush(aside)
        aside.rename(path)
        _flush(path.parent)

    def _clear_tmp(self) -> None:
        # Finds nothing, rather than fail, if the folder was deleted under a running job.
        with writing(self.path):
            for path in self._tmp.glob("*"):
                path.unlink(missing_ok=True)


@contextmanager
def writing(path: pathlib.Path) -> Iterator[None]:
    """Turns a failure to write into one message.

    Raises:
        JobError: The disk is full or the folder cannot be written to any more.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error).splitlines()[0]
        raise JobError(
            f"cannot write to {error.filename or path}: {reason}; finished parts are kept, once "
            "this is mended running the job again continues"
        ) from None


def _check_ours(path: pathlib.Path) -> None:
    try:
        if not path.exists():
            return
        if not path.is_dir():
            raise OutputConflictError(f"output.path: {path} is a file; choose a folder")
        found = sorted(entry.name for entry in path.iterdir() if entry.name != _OURS)
        is_ours = (path / _OURS / "job.json").exists()
    except OSError as error:
        raise ConfigError(f"output.path: cannot read {path}: {error.strerror}") from None
    if found and not is_ours:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise OutputConflictError(
            f"output.path: {path} is not empty and was not made by jaxpaged: it holds "
            f"{', '.join(found[:3])}{more}; choose another folder"
        )


def _check_identity(path: pathlib.Path, job: Mapping[str, object], num_parts: int) -> None:
    known = _read_json(path / _OURS / "job.json")
    if known is None:
        raise OutputConflictError(
            f"output.path: {path / _OURS / 'job.json'} cannot be read, so that nobody knows whose "
            f"the {num_parts} parts beside it are; choose another folder"
        )
    changes = identity.differences(known, job)
    if changes:
        more = [f"and {len(changes) - _SHOWN} more"] if len(changes) > _SHOWN else []
        listed = "".join(f"\n  {change}" for change in [*changes[:_SHOWN], *more])
        raise IdentityError(
            f"output.path: {path} holds {num_parts} parts of a job that differs from this one "
            f"(there -> here):{listed}\nChange that back to continue the job, or choose another "
            "output.path"
        )


def _part_names(path: pathlib.Path) -> set[str]:
    if not path.is_dir():
        return set()
    names = {entry.name for entry in path.iterdir()}
    return {name for name in names if name.endswith(".parquet") and not name.startswith(_HIDDEN)}


def _part_sizes(path: pathlib.Path) -> dict[str, int]:
    """Bytes by part; a directory in a part's place has none."""
    parts = [path / name for name in sorted(_part_names(path))]
    return {part.name: part.stat().st_size for part in parts if part.is_file()}


def _is_whole(path: pathlib.Path, num_rows: int, schema: pa.Schema) -> bool:
    try:
        with path.open("rb") as file:
            metadata = pq.read_metadata(file)
            names = metadata.schema.to_arrow_schema().names
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return False
    except OSError as error:
        # Parquet too raises OSError, without a number, for a footer that makes no sense.
        if error.errno is None:
            return False
        raise JobError(
            f"{path}: cannot read this part: {error.strerror}; make it readable, or delete it to "
            "have its rows completed again"
        ) from None
    return metadata.num_rows == num_rows and names == schema.names


def _read_json(path: pathlib.Path) -> dict[str, object] | None:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _flush(path: pathlib.Path) -> None:
    """Has the disk hold what was written to a file, or the names in a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
