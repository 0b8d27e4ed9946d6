"""A run, an extension and a retry of one small job: what each finds, and what it leaves."""

import dataclasses
import pathlib
import shutil
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from failing_disk import NumberedDisk
from killable_job import complete, scripted
from outside_reader import OutsideReader, table

from jaxpaged.job.look import verify
from jaxpaged.job.planned_job import open_output
from jaxpaged.job.spec import JobSpec
from jaxpaged.storage.disk import Disk

_WHERE = "finish_reason = 'length' AND completion_tokens = 4"
_SETTINGS = ("sampling.max_tokens=9",)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A command, and the output folder it works on.

    Attributes:
        order: The command, as a killable job takes it.
        kept: What the folder holds in front of the command, to be copied; None for nothing.
        before: The rows in it.
        after: The rows behind the command.
        steps: The steps of the disk that the command takes.
    """

    order: dict[str, Any]
    kept: pathlib.Path | None
    before: pa.Table | None
    after: pa.Table
    steps: list[str]

    @property
    def out(self) -> pathlib.Path:
        return pathlib.Path(self.order["job"]["output"]["path"])

    def begin(self) -> OutsideReader:
        """Makes the folder what it is in front of the command, for a reader that saw it."""
        shutil.rmtree(self.out)
        if self.kept is not None:
            shutil.copytree(self.kept, self.out)
        allowed = [rows for rows in (self.before, self.after) if rows is not None]
        reader = OutsideReader(self.out, allowed)
        reader.look()
        return reader

    def complete(self, disk: Disk | None = None) -> None:
        """The command, in this process."""
        complete(self.order, scripted(self.order["job"]), disk or Disk())

    def check_finished(self) -> None:
        """The folder is what the command leaves when nothing happens to it."""
        assert table(self.out).equals(self.after)
        store = open_output(JobSpec.from_dict(self.order["job"]))
        assert not verify.verify(store).problems
        private = self.out / "_jaxpaged"
        assert not list((private / "journal").iterdir())
        # A kill behind the very end may leave the attempt's own last words unfinished.
        assert all("-attempts-" in path.name for path in (private / "tmp").iterdir())


def make_scene(
    place: pathlib.Path, model: pathlib.Path, command: str, durability: str = "process"
) -> Scene:
    """The scene of a command: a job of seven rows, of which one is faulty and some are alike."""
    _write_rows(place, "a", "a", "cccc", None)
    _write_rows(place, "b")
    _write_rows(place, "c", "a", "dddd", "bb", "a")
    order = _order(command, model, place, durability)
    if command != "run":
        complete(order | {"command": "run"}, scripted(order["job"]), NumberedDisk())
        shutil.copytree(place / "out", place / "kept")
    if command == "extend":
        _write_rows(place, "0", "new", "bb")
    before, disk = None if command == "run" else table(place / "out"), NumberedDisk()
    complete(order, scripted(order["job"]), disk)
    return Scene(
        order=order,
        kept=None if command == "run" else place / "kept",
        before=before,
        after=table(place / "out"),
        steps=disk.steps,
    )


def _write_rows(place: pathlib.Path, name: str, *texts: str | None) -> None:
    (place / "in").mkdir(exist_ok=True)
    rows = pa.table({"q": pa.array(texts, pa.string())})
    pq.write_table(rows, place / "in" / f"{name}.parquet")


def _order(
    command: str, model: pathlib.Path, place: pathlib.Path, durability: str
) -> dict[str, Any]:
    job = {
        "model": str(model),
        "input": {"path": str(place / "in"), "prompt_column": "q"},
        "output": {
            "path": str(place / "out"),
            "rows_per_part": 4,
            "journal_interval": 0.0,
            "durability": durability,
        },
        "sampling": {"max_tokens": 4},
        "engine": {"max_num_seqs": 4},
    }
    return {"command": command, "job": job, "where": _WHERE, "settings": _SETTINGS}
