"""Commit records: one small file for each finished unit, and for each retry that redid it.

A unit counts as finished from the moment its record exists; the record says what its part is.
"""

import dataclasses
import json
import re

import pydantic

from jaxpaged.errors import OutputConflictError
from jaxpaged.job.tally import Counts
from jaxpaged.job.units import Unit
from jaxpaged.storage.store import Store

FOLDER = "_jaxpaged/commits"

_NAME = re.compile(r"(\d{6})-r(\d+)\.json")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CommitRecord:
    """What a unit's part is.

    Attributes:
        unit: The unit's index.
        start: The global index of its first row.
        stop: One past its last row.
        revision: The revision that made the part.
        fingerprint: That revision's fingerprint.
        attempt: The run that made the part.
        num_bytes: The part's size.
        sha256: Of the part's bytes.
        counts: What its rows come to.
        committed: When.
        adopted_by: The later run that found the part whole and without a record, if one did.
    """

    unit: int
    start: int
    stop: int
    revision: int
    fingerprint: str
    attempt: int
    num_bytes: int
    sha256: str
    counts: Counts
    committed: str
    adopted_by: int | None = None

    @property
    def name(self) -> str:
        """The name of its file."""
        return record_name(self.unit, self.revision)

    def is_of(self, unit: Unit) -> bool:
        """Whether it is about this very unit of this very revision."""
        mine = (self.unit, self.start, self.stop, self.revision, self.fingerprint)
        return mine == (unit.index, unit.start, unit.stop, unit.revision, unit.fingerprint)

    def to_bytes(self) -> bytes:
        """The record as it is stored."""
        return (json.dumps(dataclasses.asdict(self), indent=1, allow_nan=False) + "\n").encode()


_ADAPTER = pydantic.TypeAdapter(CommitRecord)


def record_name(unit: int, revision: int) -> str:
    """The name of the record of a unit and revision."""
    return f"{FOLDER}/{unit:06d}-r{revision}.json"


def committed(store: Store) -> dict[int, tuple[int, ...]]:
    """By unit, the revisions that have a record, in order; by names alone, which is cheap."""
    found: dict[int, list[int]] = {}
    for entry in store.entries(FOLDER):
        if name := _NAME.fullmatch(entry):
            found.setdefault(int(name[1]), []).append(int(name[2]))
    return {unit: tuple(sorted(revisions)) for unit, revisions in found.items()}


def read(store: Store, unit: int, revision: int) -> CommitRecord:
    """The record of a unit and revision.

    Raises:
        OutputConflictError: It is missing or no such record.
        StorageError: It cannot be read.
    """
    name = record_name(unit, revision)
    try:
        content = json.loads(store.read(name) or b"")
        record = _ADAPTER.validate_python(content)
        if (record.unit, record.revision) != (unit, revision):
            raise ValueError("it is another unit's")
    except (ValueError, RecursionError):
        raise OutputConflictError(
            f"output.path: {store.url}/{name} is no commit record any more; `jaxpaged verify` "
            "tells what else is wrong, `jaxpaged run JOB --repair` mends it"
        ) from None
    return record
