"""The output folder of a job that this process writes: claim it, recover it, commit units to it.

    out/
      part-000000.parquet ...    finished parts, the only names that readers of the folder see
      _SUCCESS                   written last: a summary of the finished job
      _jaxpaged/
        job.json, revisions/     what the job is; see `history`
        commits/                 a record for each finished unit; see `commit`
        journal/                 finished rows of units in flight; see `journal`
        attempts/, lock          who writes; see `attempt`
        superseded/, rejected/   parts that a retry or a repair replaced
        report.json, report.html the report of the last run
        tmp/                     what is not finished yet

The steps of a commit, each of which may be the last one before a power loss:

    1  the part is written aside and closed      5  the record is created exclusively: the commit
    2  it is read back, every page of it         6  the unit's journal is removed
    3  it is flushed
    4  it is renamed to its name, the folder is flushed

A part without a record (the end came between 4 and 5) is adopted by the next run if it verifies.
"""

import contextlib
import dataclasses
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import BinaryIO

import pyarrow as pa

from jaxpaged.errors import OutputConflictError, StorageError
from jaxpaged.job.adapter_choice import AdapterChoice
from jaxpaged.job.output import commit, history, output_view, part_file
from jaxpaged.job.output.attempt import Attempt
from jaxpaged.job.output.commit import CommitRecord
from jaxpaged.job.output.history import History
from jaxpaged.job.output.output_view import PAGE, REJECTED, REPORT, SUCCESS, SUPERSEDED
from jaxpaged.job.output.part_file import ForeignPart, PartProblem
from jaxpaged.job.sections import EvalSpec
from jaxpaged.job.tally import Tally
from jaxpaged.job.units import Unit, Units
from jaxpaged.storage.store import Store


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """What a run found of earlier ones.

    Attributes:
        committed: The units that have a record.
        adopted: Parts that had none and were whole.
        removed: Parts that had none and were not.
    """

    committed: frozenset[int]
    adopted: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


class OutputFolder:
    """A folder whose writer this process is; use it in a `with` statement.

    Args:
        store: Where it lies.
        attempt: Proves that this process is the writer.
        schema: Of every part.
        scoring: What of it is scored.
        adapters: How rows choose an adapter; None where there are none.
    """

    def __init__(
        self,
        store: Store,
        attempt: Attempt,
        *,
        schema: pa.Schema,
        scoring: EvalSpec | None,
        adapters: AdapterChoice | None = None,
    ) -> None:
        self.store = store
        self.attempt = attempt
        self.schema = schema
        self._columns = part_file.columns(schema)
        self._scoring = scoring
        self._adapters = adapters
        # By unit, the revision of its latest record.
        self._revisions: dict[int, int] = {}

    def __enter__(self) -> "OutputFolder":
        self.store.sweep()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        # What ended the run matters more.
        with contextlib.suppress(*(() if error is None else (StorageError,))):
            self.store.sweep()

    def claim(self, seen: History | None, wanted: History) -> None:
        """Makes the folder that of the wanted history; from here on it changes.

        Args:
            seen: The folder's history before this process was its writer.
            wanted: The history this run continues: the seen one, with a revision more or the
                last one withdrawn, or that of a new job.

        Raises:
            OutputConflictError: Another process changed the history meanwhile.
        """
        found = history.read(self.store) if output_view.has_results(self.store) else None
        if (found and found.fingerprint) != (seen and seen.fingerprint):
            raise OutputConflictError(
                f"output.path: another process changed {self.store.url} while this one started; "
                "run the command again"
            )
        if seen is None or seen.job.fingerprint != wanted.job.fingerprint:
            self._begin(wanted)
        else:
            self._revise(seen, wanted)
        marked = output_view.read_json(self.store, SUCCESS) or {}
        is_there = SUCCESS in self.store.entries()
        if is_there and marked.get("fingerprint") != wanted.fingerprint:
            self.attempt.check()
            self.store.delete(SUCCESS)

    def recover(self, units: Units) -> Recovery:
        """Finds what earlier runs finished; adopts parts without a record, or removes them.

        Raises:
            OutputConflictError: A committed part is not there any more as it was, or there are
                parts that are not this job's.
        """
        sizes = output_view.visible_parts(self.store)
        records = self._committed()
        foreign = sorted(sizes.keys() - {unit.part_name for unit in units})
        if foreign:
            raise OutputConflictError(
                f"output.path: {self.store.url}/{foreign[0]} is no part of this job; move it "
                "elsewhere, or choose another folder"
            )
        loose = [u for u in units if u.index not in records and u.part_name in sizes]
        adopted = [unit for unit in loose if self._adopts(unit)]
        removed = tuple(unit.part_name for unit in loose if unit not in adopted)
        for name in removed:
            self.store.delete(name)
        return Recovery(
            committed=frozenset(
                [unit for unit in records if unit < len(units)] + [u.index for u in adopted]
            ),
            adopted=tuple(unit.part_name for unit in adopted),
            removed=removed,
        )

    def recover_retry(self, units: Iterable[Unit]) -> Recovery:
        """The same for units of a retry, whose parts are there in any case: earlier ones."""
        records = self._committed()
        done = [unit for unit in units if unit.revision in records.get(unit.index, ())]
        loose = [unit for unit in units if unit not in done and self._is_made_by(unit)]
        adopted = [unit for unit in loose if self._adopts(unit)]
        for unit in (unit for unit in loose if unit not in adopted):
            # Torn by a power loss without flushes: the part before it was kept.
            self.store.copy(_superseded(unit, records[unit.index][-1]), unit.part_name)
        return Recovery(
            committed=frozenset(unit.index for unit in [*done, *adopted]),
            adopted=tuple(unit.part_name for unit in adopted),
        )

    def commit(self, unit: Unit) -> Tally:
        """Makes the closed part that lies aside the unit's; returns what its rows come to.

        A part that the unit has of an earlier revision is kept out of sight.

        Raises:
            OutputConflictError: This process is not the writer any more.
            StorageError: The part could not be written, or does not read as what was written.
        """
        self.attempt.check()
        scratch = self.store.scratch(unit.part_name)
        try:
            with scratch.open("rb") as file:
                record, counted = self._describe(unit, file)
        except (OSError, PartProblem) as error:
            raise StorageError(
                f"{scratch}: does not read back as it was written ({error}); is the disk sound? "
                "Finished parts are kept, running the job again continues"
            ) from None
        is_new = unit.index not in self._revisions
        if not is_new:
            self._keep_superseded(unit, self._revisions[unit.index])
            self.attempt.check()
        if not self.store.publish(scratch, unit.part_name, is_new=is_new):
            raise self._taken(unit.part_name)
        self._create(record.name, record.to_bytes())
        self._revisions[unit.index] = unit.revision
        return counted

    def discard(self, unit: Unit) -> None:
        """Takes back the commit of a unit; its part, whatever it is, is kept out of sight."""
        self.attempt.check()
        self.store.delete(SUCCESS)
        if unit.part_name in output_view.visible_parts(self.store):
            self.store.copy(unit.part_name, f"{REJECTED}/{unit.part_name}.a{self.attempt.number}")
            self.store.delete(unit.part_name)
        for revision in commit.committed(self.store).get(unit.index, ()):
            self.store.delete(commit.record_name(unit.index, revision))
        self._revisions.pop(unit.index, None)

    def write_report(self, report: Mapping[str, object]) -> None:
        """Replaces the report."""
        self.attempt.check()
        self.store.replace(REPORT, output_view.to_bytes(report))

    def write_page(self, page: str) -> None:
        """Replaces the report's page."""
        self.attempt.check()
        self.store.replace(PAGE, page.encode())

    def finish(self, known: History, summary: Mapping[str, object]) -> None:
        """Marks the job as finished, with the sizes of its parts: the last thing written."""
        self.attempt.check()
        content = {
            **summary,
            "fingerprint": known.fingerprint,
            "revision": len(known.revisions),
            "finished": history.now(),
            "part_bytes": output_view.visible_parts(self.store),
        }
        self.store.replace(SUCCESS, output_view.to_bytes(content))

    def _committed(self) -> dict[int, tuple[int, ...]]:
        """By unit, the revisions that have a record; remembers the latest."""
        records = commit.committed(self.store)
        self._revisions = {unit: revisions[-1] for unit, revisions in records.items()}
        return records

    def _begin(self, wanted: History) -> None:
        if output_view.has_results(self.store):
            raise OutputConflictError(
                f"output.path: {self.store.url} holds results, but no record of the job that made "
                "them; restore _jaxpaged/job.json, or choose another folder"
            )
        self.attempt.check()
        # Of a job that began and completed nothing.
        for name in self.store.entries(history.REVISIONS):
            self.store.delete(f"{history.REVISIONS}/{name}")
        self.store.delete(history.JOB)
        self._create(history.JOB, history.to_bytes(wanted.job))

    def _revise(self, seen: History, wanted: History) -> None:
        """Withdraws and adds revisions; of each there is at most one."""
        pairs = zip(seen.revisions, wanted.revisions, strict=False)
        num_shared = sum(1 for old, new in pairs if old == new)
        for revision in reversed(seen.revisions[num_shared:]):
            if output_view.is_settled(self.store, revision):
                raise OutputConflictError(
                    f"output.path: revision {revision.number} of {self.store.url} has changed "
                    "parts and cannot be withdrawn any more"
                )
            self.store.delete(revision.name)
        for revision in wanted.revisions[num_shared:]:
            self._create(revision.name, history.to_bytes(revision))

    def _create(self, name: str, data: bytes) -> None:
        if not self.store.create(name, data):
            raise self._taken(name)

    def _taken(self, name: str) -> OutputConflictError:
        return OutputConflictError(
            f"output.path: {self.store.url}/{name} exists already, made by another process; run "
            "the command again once that one has ended"
        )

    def _describe(
        self, unit: Unit, file: BinaryIO, adopted_by: int | None = None
    ) -> tuple[CommitRecord, Tally]:
        attempt = part_file.check(file, unit, self._columns)
        file.seek(0)
        counted = Tally(self._scoring, unit.rows_each, adapters=self._adapters)
        counted.add_part(file)
        record = CommitRecord(
            unit=unit.index,
            start=unit.start,
            stop=unit.stop,
            revision=unit.revision,
            fingerprint=unit.fingerprint,
            attempt=attempt,
            sha256=part_file.sha256(file),
            num_bytes=file.tell(),
            counts=counted.counts(),
            committed=history.now(),
            adopted_by=adopted_by,
        )
        return record, counted

    def _adopts(self, unit: Unit) -> bool:
        """Commits the part that lies there if it is this unit's, whole."""
        with self._opened(unit) as file:
            try:
                record, _ = self._describe(unit, file, adopted_by=self.attempt.number)
            except ForeignPart as error:
                raise OutputConflictError(
                    f"output.path: {self.store.url}/{unit.part_name} is no part of this job "
                    f"({error}); move it elsewhere, or choose another folder"
                ) from None
            except PartProblem:
                return False
        # Whoever wrote it may have ended before it was on the disk.
        self.store.flush(unit.part_name)
        self._create(record.name, record.to_bytes())
        self._revisions[unit.index] = unit.revision
        return True

    def _is_made_by(self, unit: Unit) -> bool:
        """Whether the part that lies there says it was made by this unit's revision."""
        with self._opened(unit) as file:
            return part_file.revision_of(file) == unit.revision

    @contextlib.contextmanager
    def _opened(self, unit: Unit) -> Iterator[BinaryIO]:
        try:
            with self.store.open(unit.part_name) as file:
                yield file
        except OSError as error:
            raise StorageError(
                f"{self.store.url}/{unit.part_name}: cannot read this part: "
                f"{error.strerror or error}; make it readable, or delete it to have its rows "
                "completed again"
            ) from None

    def _keep_superseded(self, unit: Unit, revision: int) -> None:
        """Keeps the part that is about to be replaced; a retry may have been a mistake."""
        if not self._is_made_by(unit):
            self.store.copy(unit.part_name, _superseded(unit, revision))


def _superseded(unit: Unit, revision: int) -> str:
    # Not named *.parquet: some readers look into hidden folders.
    return f"{SUPERSEDED}/{unit.part_name}.r{revision}"
