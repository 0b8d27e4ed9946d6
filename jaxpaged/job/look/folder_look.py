"""One look at an output folder, and what is wrong with each unit as it stood at that moment.

What a writer at work has not finished is not wrong. Changes nothing.
"""

import dataclasses
from collections.abc import Iterable, Iterator

from jaxpaged.errors import OutputConflictError, StorageError
from jaxpaged.job.look import known_job, presence
from jaxpaged.job.look.part_check import PartCheck
from jaxpaged.job.output import commit, output_view, part_file
from jaxpaged.job.output.part_file import ForeignPart, PartProblem
from jaxpaged.job.output.row_addresses import RowAddresses
from jaxpaged.job.units import Unit
from jaxpaged.storage.store import Store

REPAIR = "`jaxpaged run JOB --repair`"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something in the folder that is not as it should be.

    Attributes:
        name: The file.
        text: What is wrong with it, and what mends it.
        unit: The unit that must be completed again to mend it; None if that would not help.
    """

    name: str
    text: str
    unit: int | None = None


class FolderLook:
    """What lay in a folder at one moment.

    Args:
        store: The folder.

    Attributes:
        known: What it remembers.
        units: The units of its job.
        records: By unit, the revisions that have a commit record.
        parts: Bytes by name of what readers take for parts; None for a folder.
        is_running: A writer is at work.
        pending: The retry that is not finished, if one is not.
        is_marked: The mark of a finished job is there.
        summary: What it says; None if that cannot be read.

    Raises:
        OutputConflictError: The folder holds no job, or its history cannot be understood.
        StorageError: The folder cannot be read.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.is_running = presence.is_running_now(store)
        # In this order, so that whatever a record is about is there: parts and revisions are
        # written before records.
        self.records = commit.committed(store)
        self.parts = output_view.visible_parts(store)
        self.known = known_job.read(store)
        self.units = known_job.units(self.known, store)
        self.pending = output_view.pending_retry(store, self.known)
        self.is_marked = output_view.SUCCESS in store.entries()
        self.summary = output_view.read_json(store, output_view.SUCCESS)
        addresses = RowAddresses(self.known.files, self.units.rows_each)
        self._check = PartCheck(self.known.job.schema, addresses)

    @property
    def committed(self) -> set[int]:
        """The units that have a record."""
        return {index for index in self.records if index < len(self.units)}

    @property
    def loose(self) -> set[int]:
        """The units that have a part and no record."""
        left = (unit for unit in self.units if unit.index not in self.records)
        return {unit.index for unit in left if unit.part_name in self.parts}

    def problems(self, units: Iterable[int]) -> dict[int, Problem]:
        """What is wrong with these units, by unit."""
        found = ((index, self._problem(self.units[index])) for index in units)
        return {index: problem for index, problem in found if problem is not None}

    def _problem(self, unit: Unit) -> Problem | None:
        try:
            if unit.index in self.records:
                return self._committed(unit)
            if unit.part_name in self.parts and not self.is_running:
                return self._loose(unit)
        except (OSError, StorageError) as error:
            text = f"cannot be read: {_reason(error)}; make it readable, or delete it and have its "
            return Problem(name=unit.part_name, text=f"{text}rows completed again by {REPAIR}")
        return None

    def _committed(self, unit: Unit) -> Problem | None:
        """What is wrong with a unit that has a record."""
        faults = list(self._faults(unit))
        if not faults:
            return None
        if self.pending is not None and self._is_of_retry(unit):
            return None if self.is_running else self._loose_of_retry(unit)
        text = f"{'; '.join(faults)}; {REPAIR} completes its rows again"
        return Problem(name=unit.part_name, text=text, unit=unit.index)

    def _faults(self, unit: Unit) -> Iterator[str]:
        number = self.records[unit.index][-1]
        name = commit.record_name(unit.index, number)
        revised = self._revised(unit, number)
        if unit.part_name not in self.parts:
            yield "is missing, though it has a commit record"
            return
        if self.parts[unit.part_name] is None:
            yield "is a folder, not a file; move it away"
            return
        if revised is None:
            yield f"has a commit record, {name}, of a revision that the job does not have"
            return
        try:
            record = commit.read(self._store, unit.index, number)
        except OutputConflictError:
            yield f"has a commit record, {name}, that cannot be read as one"
            return
        if not record.is_of(revised):
            yield f"has a commit record, {name}, that is about other rows, or of another job"
            return
        with self._store.open(unit.part_name) as file:
            yield from self._check.faults(file, revised, record)

    def _revised(self, unit: Unit, number: int) -> Unit | None:
        """The unit as a revision made it; None if it did not."""
        if number == unit.revision:
            return unit
        for retry in self.known.retries:
            if retry.number == number and unit.index in retry.units:
                return dataclasses.replace(unit, revision=number, fingerprint=retry.fingerprint)
        return None

    def _loose(self, unit: Unit) -> Problem:
        """What is wrong with a part that has no record."""
        if self.parts[unit.part_name] is None:
            return Problem(name=unit.part_name, text="is a folder, not a file; move it away")
        try:
            with self._store.open(unit.part_name) as file:
                part_file.check(file, unit, self.known.job.schema)
            text = f"is whole, but has no commit record; {REPAIR} commits it"
        except ForeignPart as error:
            text = f"is no part of this job ({error}); move it elsewhere"
        except PartProblem as error:
            text = f"has no commit record and is not whole ({error}); {REPAIR} replaces it"
        return Problem(name=unit.part_name, text=text)

    def _is_of_retry(self, unit: Unit) -> bool:
        """Whether its part was made by the retry that is not finished, which did not commit it."""
        assert self.pending is not None, "asked only where there is such a retry"
        number = self.pending.number
        if unit.index not in self.pending.units or number in self.records[unit.index]:
            return False
        if self.parts.get(unit.part_name) is None:
            return False
        with self._store.open(unit.part_name) as file:
            return part_file.revision_of(file) == number

    def _loose_of_retry(self, unit: Unit) -> Problem:
        assert self.pending is not None, "asked only where there is such a retry"
        text = (
            f"was made by revision {self.pending.number}, a retry, and has no commit record of "
            f"it; `jaxpaged retry {self._store.url}` commits it or makes it again"
        )
        return Problem(name=unit.part_name, text=text)


def _reason(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return (text.splitlines() or [type(error).__name__])[0]
