"""What a job shows while it runs: its folder to readers, its progress to a display."""

import pathlib

import pyarrow.dataset

from jaxpaged.job.progress import Snapshot


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

    def begin(self, *, total: int, done: int) -> None:
        self.begun = (total, done)

    def update(self, snapshot: Snapshot) -> None:
        self.snapshots.append(snapshot)

    def end(self) -> None:
        self.has_ended = True
