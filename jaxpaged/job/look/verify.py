"""Whether an output folder is what its records say: bytes, rows, columns, order.

Reads every byte of every part, and changes nothing. Needs neither the job file nor input or model.
"""

import dataclasses
from collections.abc import Container, Iterator, Mapping
from typing import Any

from jaxpaged.errors import OutputConflictError
from jaxpaged.job.look.folder_look import FolderLook, Problem
from jaxpaged.job.output import commit, output_view
from jaxpaged.job.output.output_view import SUCCESS, some
from jaxpaged.storage.store import Store


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What was found.

    Attributes:
        problems: All of it.
        parts: Committed parts that are right.
        rows: Rows in them.
        units: Units of the job.
        is_finished: The job is marked as finished, with all its parts.
        is_running: A writer is at work; what it has not finished is no problem.
    """

    problems: tuple[Problem, ...]
    parts: int
    rows: int
    units: int
    is_finished: bool
    is_running: bool

    @property
    def rejected(self) -> frozenset[int]:
        """The units to complete again."""
        return frozenset(p.unit for p in self.problems if p.unit is not None)

    @property
    def exit_code(self) -> int:
        """0 if nothing is wrong, finished or not; else that of an `OutputConflictError`."""
        return OutputConflictError.exit_code if self.problems else 0

    def to_json(self) -> dict[str, Any]:
        """`is_right` and the attributes in JSON's types; a problem is its name, text and unit."""
        return {"is_right": not self.problems, **dataclasses.asdict(self)}


def verify(store: Store) -> Verification:
    """Looks at all of an output folder, even while a job writes to it.

    Raises:
        OutputConflictError: The folder holds no job, or its history cannot be understood.
        StorageError: The folder cannot be read.
    """
    look = FolderLook(store)
    committed = look.committed
    wrong = look.problems(sorted(committed | look.loose))
    # The writer may have replaced a part, or begun a revision, since it was listed. So what is
    # wrong is looked at again, until it stays as it is.
    before: set[int] = set()
    while wrong and wrong.keys() != before:
        before = set(wrong)
        look = FolderLook(store)
        wrong = look.problems(sorted(before))
    right = committed - wrong.keys()
    last = FolderLook(store)
    problems = [*wrong.values(), *_strangers(last), *_success(last, wrong.keys())]
    return Verification(
        problems=tuple(problems),
        parts=len(right),
        rows=sum(last.units[index].num_rows for index in right),
        units=len(last.units),
        is_finished=output_view.is_finished(store, last.known, last.units),
        is_running=last.is_running,
    )


def _strangers(look: FolderLook) -> Iterator[Problem]:
    """Files of no unit."""
    for name in sorted(look.parts.keys() - {unit.part_name for unit in look.units}):
        text = "is no part of this job, but readers take it for one; move it elsewhere"
        yield Problem(name=name, text=text)
    for index in sorted(index for index in look.records if index >= len(look.units)):
        for revision in look.records[index]:
            text = "is a commit record of a unit that the job does not have; move it elsewhere"
            yield Problem(name=commit.record_name(index, revision), text=text)


def _success(look: FolderLook, wrong: Container[int]) -> Iterator[Problem]:
    """Whether the mark of a finished job is right; a writer at work removes and makes it."""
    if look.is_running:
        return
    left = [unit.part_name for unit in look.units if unit.index not in look.records]
    again = "`jaxpaged run JOB` writes it again"
    if not look.is_marked:
        if not left and look.pending is None:
            text = f"is missing, though every part is committed; {again}"
            yield Problem(name=SUCCESS, text=text)
        return
    if look.summary is None:
        yield Problem(name=SUCCESS, text=f"does not read as what a finished job writes; {again}")
        return
    faults = [f"{some(left)} not committed"] if left else []
    faults += _summary_faults(look, look.summary, wrong)
    if faults:
        yield Problem(name=SUCCESS, text=f"is wrong: {'; '.join(faults)}; {again}")


def _summary_faults(
    look: FolderLook, summary: Mapping[str, object], wrong: Container[int]
) -> Iterator[str]:
    if summary.get("fingerprint") != look.known.fingerprint:
        yield "it is not about this job, or not about its last revision"
    if summary.get("rows") != look.units.num_rows:
        yield f"it says {summary.get('rows')!r} rows, the job has {look.units.num_rows:,}"
    listed = summary.get("part_bytes")
    sizes = listed if isinstance(listed, dict) else {}
    # What is wrong with a part itself is told once, with the part.
    names = {unit.part_name for unit in look.units}
    others = {
        unit.part_name
        for unit in look.units
        if unit.index not in wrong and sizes.get(unit.part_name) != look.parts.get(unit.part_name)
    }
    if odd := sorted(others | (sizes.keys() - names)):
        yield f"its sizes of {some(odd)} are not those of the parts"
