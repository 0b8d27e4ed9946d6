"""What an output folder shows to anyone who looks: parts, records, whether the job is finished.

Looks only, changes nothing; works while another process writes. The layout is drawn in
`output_folder`.
"""

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from jaxpaged.errors import OutputConflictError, StorageError
from jaxpaged.job.output import commit, history, journal, part_file
from jaxpaged.job.output.commit import CommitRecord
from jaxpaged.job.output.history import History, Revision
from jaxpaged.job.units import Units, part_name
from jaxpaged.storage.store import Store

PRIVATE = "_jaxpaged"
REPORT = f"{PRIVATE}/report.json"
"""Where the report lies in the folder; a visible name would break readers of the folder."""

PAGE = f"{PRIVATE}/report.html"
"""The same as a page to look at."""

SUCCESS = "_SUCCESS"
SUPERSEDED = f"{PRIVATE}/superseded"
REJECTED = f"{PRIVATE}/rejected"

_HIDDEN = ("_", ".")
# No string of a JSON text has a line break in it.
_NUMBERS = re.compile(r"\[\n(?:\s+-?\d[\d.eE+-]*,?\n)+\s+\]")
_READERS = 16
_SHOWN = 3


def check_ours(store: Store) -> None:
    """Refuses a folder with content that no job of this tool made.

    Raises:
        OutputConflictError: It is not ours; the message says what is in it.
        StorageError: It cannot be read.
    """
    found = [name for name in store.entries() if name != PRIVATE]
    if found and store.read(history.JOB) is None:
        raise OutputConflictError(
            f"output.path: {store.url} is not empty and was not made by jaxpaged: it holds "
            f"{some(found)}; choose another folder"
        )


def visible_parts(store: Store) -> dict[str, int | None]:
    """Bytes by name of what readers take for parts; None for a folder in a part's place."""
    return {
        name: size
        for name, size in store.entries().items()
        if name.endswith(".parquet") and not name.startswith(_HIDDEN)
    }


def has_results(store: Store) -> bool:
    """Whether the folder holds anything that a job has completed."""
    return bool(store.entries(commit.FOLDER) or store.logs(journal.FOLDER) or visible_parts(store))


def is_finished(store: Store, known: History, units: Units) -> bool:
    """Whether all parts of this job are there, as `_SUCCESS` says; looks only."""
    summary = read_json(store, SUCCESS)
    if summary is None or summary.get("fingerprint") != known.fingerprint:
        return False
    sizes = visible_parts(store)
    return sizes == summary.get("part_bytes") and len(sizes) == len(units)


def pending_retry(store: Store, known: History) -> Revision | None:
    """The retry that is not finished; there is at most one."""
    records = commit.committed(store)
    for revision in known.retries:
        if any(revision.number not in records.get(unit, ()) for unit in revision.units):
            return revision
    return None


def is_complete(store: Store, units: Units) -> bool:
    """Whether every unit has a commit record."""
    return commit.committed(store).keys() >= set(range(len(units)))


def is_settled(store: Store, revision: Revision) -> bool:
    """Whether a revision, the last one, has changed any part; if not it can be withdrawn."""
    records = commit.committed(store)
    if any(revision.number in revisions for revisions in records.values()):
        return True
    names = visible_parts(store)
    if revision.kind == "retry":
        candidates = [part_name(unit) for unit in revision.units]
    else:
        candidates = sorted(names.keys() - {part_name(unit) for unit in records})
    return any(_revision_of(store, name) == revision.number for name in candidates if name in names)


def current_records(store: Store, units: Iterable[int]) -> list[CommitRecord]:
    """The latest record of each of these units that has one, in order.

    Raises:
        OutputConflictError: A record cannot be read as one.
    """
    latest = {unit: revisions[-1] for unit, revisions in commit.committed(store).items()}
    wanted = [(unit, latest[unit]) for unit in units if unit in latest]
    # One by one is slow where each takes a round trip.
    with ThreadPoolExecutor(_READERS) as pool:
        return list(pool.map(lambda key: commit.read(store, *key), wanted))


def check_committed(
    store: Store, records: Iterable[CommitRecord], units: Units, known: History
) -> None:
    """Refuses to go on beside committed parts that are gone or changed.

    Raises:
        OutputConflictError: A part has not the size that its record says, or the record is not
            this job's.
    """
    sizes = visible_parts(store)
    bad = []
    for record in records:
        unit = dataclasses.replace(
            units[record.unit],
            revision=record.revision,
            fingerprint=known.fingerprint_of(record.revision) or "",
        )
        if not record.is_of(unit) or sizes.get(unit.part_name) != record.num_bytes:
            bad.append(unit.part_name)
    if bad:
        raise OutputConflictError(
            f"output.path: {len(bad):,} committed parts in {store.url} are missing or changed: "
            f"{some(bad)}; put them back, or complete their rows again with `jaxpaged run JOB "
            "--repair` (`jaxpaged verify` looks closer)"
        )


def read_json(store: Store, name: str) -> dict[str, object] | None:
    """A JSON object of the folder; None if there is none that can be read."""
    try:
        content = json.loads(store.read(name) or b"null")
    except (StorageError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def to_bytes(content: Mapping[str, object]) -> bytes:
    """A JSON object as the folder has it: indented, but for lists of numbers."""
    text = json.dumps(content, indent=1, allow_nan=False)
    return (_NUMBERS.sub(lambda found: " ".join(found[0].split()), text) + "\n").encode()


def _revision_of(store: Store, name: str) -> int | None:
    try:
        with store.open(name) as file:
            return part_file.revision_of(file)
    except OSError as error:
        raise StorageError(f"{store.url}/{name}: cannot read this part: {error}") from None


def some(names: Sequence[str]) -> str:
    """The first few names and how many more there are."""
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"
