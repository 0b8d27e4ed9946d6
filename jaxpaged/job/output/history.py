"""What an output folder remembers of its job: the record it began with, and its revisions since.

    job.json                 revision 0: what the rows are
    revisions/000001.json    an "extend" brought new input files, or a "retry" redid chosen rows
    ...

Each is written once and names the fingerprint of the one before it. Knows what the records say,
not whether it is true of the folder.
"""

import dataclasses
import datetime
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import pydantic

from jaxpaged.errors import OutputConflictError
from jaxpaged.job.input.file_record import FileRecord
from jaxpaged.job.units import Segment
from jaxpaged.storage.store import Store

FORMAT = 2
"""Of the records; raised when what they hold changes its meaning."""

JOB = "_jaxpaged/job.json"
REVISIONS = "_jaxpaged/revisions"

_Record = TypeVar("_Record", "JobRecord", "Revision")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """What a job was when it began.

    Attributes:
        result_keys: The keys of the job file that decide what the rows are, by dotted name.
        run_keys: The others, as they were in the first run.
        model: Fingerprints of the model's parts.
        input: The input files, in order.
        schema: Name and type of each output column.
        fingerprint: Of all that the rows depend on.
        created: When it was written; the date in prompts, if a chat template asks for one.
        format: Of the record.
    """

    result_keys: dict[str, Any]
    run_keys: dict[str, Any]
    model: dict[str, str]
    input: tuple[FileRecord, ...]
    schema: tuple[tuple[str, str], ...]
    fingerprint: str
    created: str
    format: int = FORMAT


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """A later change of a folder.

    Attributes:
        number: Its place: 1, 2, ...
        kind: "extend" or "retry".
        parent: The fingerprint of the revision before.
        fingerprint: Its own.
        created: When it was written.
        input: The new files of an "extend".
        where: Which rows a "retry" redoes.
        settings: What a "retry" sets for them, by dotted name.
        units: The units a "retry" redoes rows of.
        rows: How many rows it redoes.
    """

    number: int
    kind: Literal["extend", "retry"]
    parent: str
    fingerprint: str
    created: str
    input: tuple[FileRecord, ...] = ()
    where: str = ""
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    units: tuple[int, ...] = ()
    rows: int = 0

    @property
    def name(self) -> str:
        """The name of its file."""
        return f"{REVISIONS}/{self.number:06d}.json"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """A job and its revisions, in order."""

    job: JobRecord
    revisions: tuple[Revision, ...] = ()

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the last revision."""
        return self.revisions[-1].fingerprint if self.revisions else self.job.fingerprint

    @property
    def files(self) -> tuple[FileRecord, ...]:
        """All input files in the order of their rows."""
        return sum((r.input for r in self.revisions), self.job.input)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The rows by the revision that brought them."""
        first = Segment(num_rows=_num_rows(self.job.input), fingerprint=self.job.fingerprint)
        later = (
            Segment(num_rows=_num_rows(r.input), revision=r.number, fingerprint=r.fingerprint)
            for r in self.revisions
            if r.kind == "extend"
        )
        return (first, *later)

    @property
    def retries(self) -> tuple[Revision, ...]:
        """The revisions that redid rows."""
        return tuple(r for r in self.revisions if r.kind == "retry")

    def extension(self, files: Sequence[FileRecord]) -> Revision:
        """The revision that would bring these files."""
        content = {"kind": "extend", "input": [_identity(file) for file in files]}
        return Revision(
            number=len(self.revisions) + 1,
            kind="extend",
            parent=self.fingerprint,
            fingerprint=digest({"parent": self.fingerprint, **content}),
            created=now(),
            input=tuple(files),
        )

    def retry(
        self, *, where: str, settings: Mapping[str, Any], units: Sequence[int], rows: int
    ) -> Revision:
        """The revision that would redo rows of these units."""
        content = {
            "kind": "retry",
            "where": where,
            "settings": dict(settings),
            "units": list(units),
        }
        return Revision(
            number=len(self.revisions) + 1,
            kind="retry",
            parent=self.fingerprint,
            fingerprint=digest({"parent": self.fingerprint, **content}),
            created=now(),
            where=where,
            settings=dict(settings),
            units=tuple(units),
            rows=rows,
        )

    def without_last(self) -> "History":
        """The history before the last revision."""
        return dataclasses.replace(self, revisions=self.revisions[:-1])

    def fingerprint_of(self, revision: int) -> str | None:
        """The fingerprint of a revision by its number; None if there is none."""
        if revision == 0:
            return self.job.fingerprint
        known = {known.number: known.fingerprint for known in self.revisions}
        return known.get(revision)

    def followed_by(self, revision: Revision) -> "History":
        """The history with one more revision."""
        return dataclasses.replace(self, revisions=(*self.revisions, revision))


def job_record(
    *,
    result_keys: dict[str, Any],
    run_keys: dict[str, Any],
    model: Mapping[str, str],
    files: Sequence[FileRecord],
    schema: Sequence[tuple[str, str]],
) -> JobRecord:
    """The record of a job that begins now."""
    content = {
        "format": FORMAT,
        "result_keys": result_keys,
        "model": dict(model),
        "input": [_identity(file) for file in files],
    }
    return JobRecord(
        result_keys=result_keys,
        run_keys=run_keys,
        model=dict(model),
        input=tuple(files),
        schema=tuple(schema),
        fingerprint=digest(content),
        created=now(),
    )


def read(store: Store) -> History | None:
    """The history in a folder; None if no job ever began there.

    Raises:
        OutputConflictError: A record cannot be understood, or is not where it belongs.
        StorageError: The folder cannot be read.
    """
    raw = store.read(JOB)
    if raw is None:
        return None
    content = _parse(raw, store, JOB)
    if content.get("format") != FORMAT:
        raise OutputConflictError(
            f"output.path: {store.url}/{JOB} is of format {content.get('format')!r}, this version "
            f"of jaxpaged reads format {FORMAT}; choose another output.path"
        )
    history = History(job=_build(JobRecord, content, store, JOB))
    try:
        datetime.datetime.fromisoformat(history.job.created)
    except ValueError:
        raise _broken(store, JOB, "created: is no moment") from None
    for entry in store.entries(REVISIONS):
        name = f"{REVISIONS}/{entry}"
        raw = store.read(name)
        if raw is None or not entry.endswith(".json"):
            continue
        revision = _build(Revision, _parse(raw, store, name), store, name)
        if revision.name != name or revision.parent != history.fingerprint:
            raise _broken(store, name, "it does not follow the revision before it")
        history = history.followed_by(revision)
    return history


def to_bytes(record: JobRecord | Revision) -> bytes:
    """The record as it is stored."""
    return (json.dumps(dataclasses.asdict(record), indent=1, allow_nan=False) + "\n").encode()


def digest(content: Mapping[str, object]) -> str:
    """SHA-256 of a value in JSON's types, whatever the order of its keys."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def now() -> str:
    """This moment, as records write it."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _identity(file: FileRecord) -> dict[str, object]:
    """What of a file counts: when and where it was written does not."""
    return {
        "name": file.name,
        "bytes": file.bytes,
        "content": file.content,
        "footer": file.footer,
        "row_groups": [list(run) for run in file.row_groups],
    }


def _num_rows(files: Sequence[FileRecord]) -> int:
    return sum(file.num_rows for file in files)


def _parse(raw: bytes, store: Store, name: str) -> dict[str, Any]:
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise _broken(store, name, "it is no JSON object")
    return content


def _build(kind: type[_Record], content: dict[str, Any], store: Store, name: str) -> _Record:
    try:
        return pydantic.TypeAdapter(kind).validate_python(content)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise _broken(store, name, f"{where}: {first['msg']}") from None


def _broken(store: Store, name: str, reason: str) -> OutputConflictError:
    return OutputConflictError(
        f"output.path: {store.url}/{name} cannot be used ({reason}), so that nobody knows whose "
        "the parts beside it are; restore the file, or choose another output.path"
    )
