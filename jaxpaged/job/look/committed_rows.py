"""What the commit records of a folder come to, as far as they can be read.

Takes the folder as it is at the moment, half written or not, and changes nothing.
"""

import dataclasses
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

from jaxpaged.errors import OutputConflictError
from jaxpaged.job.look import journal_count, known_job
from jaxpaged.job.output import commit, output_view
from jaxpaged.job.output.commit import CommitRecord
from jaxpaged.job.output.history import History, Revision
from jaxpaged.job.tally import Counts, Tally
from jaxpaged.job.units import Unit
from jaxpaged.storage.store import Store

_READERS = 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RevisionStatus:
    """A later change of the folder.

    Attributes:
        number: 1, 2, ...
        kind: "extend" or "retry".
        created: When it began.
        rows: The new rows, or the rows that are redone.
        where: Which rows a retry redoes; "" for an extension.
        settings: What a retry sets for them.
        is_finished: All of its parts are committed.
    """

    number: int
    kind: str
    created: str
    rows: int
    where: str
    settings: dict[str, Any]
    is_finished: bool


class CommittedRows:
    """The committed rows of a folder.

    Args:
        store: The folder.
        known: What it remembers.

    Attributes:
        units: The units of its job.
        num_bad: Records that cannot be read.
        counts: What the rows of the others come to.

    Raises:
        OutputConflictError: The folder's record does not say how rows are cut into parts.
        StorageError: The folder cannot be read.
    """

    def __init__(self, store: Store, known: History) -> None:
        self._store = store
        self._known = known
        self.units = known_job.units(known, store)
        found = commit.committed(store)
        self._revisions = {i: numbers for i, numbers in found.items() if i < len(self.units)}
        # One by one is slow where each takes a round trip.
        with ThreadPoolExecutor(_READERS) as pool:
            records = list(pool.map(self._read, self._revisions))
        tally = Tally(None)
        for record in records:
            if record is not None:
                tally.add_counts(record.counts)
        self.num_bad = records.count(None)
        self.counts: Counts = tally.counts()

    @property
    def num_parts(self) -> int:
        """Committed units."""
        return len(self._revisions)

    @property
    def num_rows(self) -> int:
        """Their rows."""
        return sum(self.units[index].num_rows for index in self._revisions)

    @property
    def is_finished(self) -> bool:
        """Whether the job is marked as finished, with all its parts."""
        return output_view.is_finished(self._store, self._known, self.units)

    @cached_property
    def revisions(self) -> tuple[RevisionStatus, ...]:
        """The later changes of the folder, in order."""
        return tuple(self._describe(revision) for revision in self._known.revisions)

    @property
    def has_open_retry(self) -> bool:
        """Whether a retry has begun and is not finished."""
        return any(one.kind == "retry" and not one.is_finished for one in self.revisions)

    def num_journaled(self) -> int:
        """Rows that the journal holds for the next run.

        Raises:
            StorageError: It cannot be read.
        """
        return journal_count.num_rows(self._store, self._wanted)

    def _read(self, index: int) -> CommitRecord | None:
        """The unit's latest record; None if it cannot be read."""
        try:
            return commit.read(self._store, index, self._revisions[index][-1])
        except OutputConflictError:
            return None

    def _describe(self, revision: Revision) -> RevisionStatus:
        mine: Sequence[int] = revision.units
        if revision.kind == "extend":
            mine = [unit.index for unit in self.units if unit.revision == revision.number]
        return RevisionStatus(
            number=revision.number,
            kind=revision.kind,
            created=revision.created,
            rows=revision.rows or sum(file.num_rows for file in revision.input),
            where=revision.where,
            settings=dict(revision.settings),
            is_finished=all(revision.number in self._revisions.get(index, ()) for index in mine),
        )

    def _wanted(self, index: int) -> Unit | None:
        """The unit that the next run would make; None if there is nothing to make."""
        if index >= len(self.units):
            return None
        unit, done = self.units[index], self._revisions.get(index)
        if done is None:
            return unit
        for retry in self._known.retries:
            if index in retry.units and retry.number not in done:
                return dataclasses.replace(
                    unit, revision=retry.number, fingerprint=retry.fingerprint
                )
        return None
