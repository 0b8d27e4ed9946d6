"""What a job shows while it runs: its folder to readers, its progress to a display."""

import pathlib

import pyarrow.dataset

from jaxpaged.job.progress import Snapshot
from jaxpaged.job.units import Segment, Units


def make_units(num_rows: int, rows_per_part: int) -> Units:
    """The units of a job that was never extended."""
    return Units(segments=(Segment(num_rows=num_rows),), rows_per_part=rows_per_part)


def rows(out: pathlib.Path) -> list[dict]:
    return pyarrow.dataset.dataset(out, format="parquet").to_table().to_pylist()


def parts(out: pathlib.Path) -> list[str]:
    return sorted(path.name for path in out.glob("*.parquet"))


class Watch:
    """Remembers what a job says about itself."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.begun: tuple[int, int] | None = None
        self.snapshots: list[Snapshot] = []
        self.has_ended = False

    def note(self, text: str) -> None:
        self.notes.append(text)

    def begin(self, *, total: int, done: int, journaled: int) -> None:
        self.begun = (total, done, journaled)

    def update(self, snapshot: Snapshot) -> None:
        self.snapshots.append(snapshot)

    def end(self) -> None:
        self.has_ended = True
