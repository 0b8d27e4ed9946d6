"""How far a running job is, kept for whoever collects its metrics in another thread."""

import dataclasses

from jaxpaged.job.progress import Progress, Snapshot


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A job whose rows are known.

    Attributes:
        total: Rows of the job.
        done: Those of them that are in finished parts of earlier runs.
    """

    total: int
    done: int


class MetricsProgress:
    """Passes everything on and remembers the last of each.

    Args:
        shown: The progress that is shown.

    Attributes:
        begun: The job's rows; None until they are known.
        latest: The state after the latest step; None before the first.
    """

    def __init__(self, shown: Progress) -> None:
        self._shown = shown
        self.begun: Begun | None = None
        self.latest: Snapshot | None = None

    def note(self, text: str) -> None:
        """Passes it on."""
        self._shown.note(text)

    def begin(self, *, total: int, done: int, journaled: int) -> None:
        """Remembers it and passes it on."""
        self.begun = Begun(total=total, done=done)
        self._shown.begin(total=total, done=done, journaled=journaled)

    def update(self, snapshot: Snapshot) -> None:
        """Remembers it and passes it on."""
        self.latest = snapshot
        self._shown.update(snapshot)

    def end(self) -> None:
        """Passes it on."""
        self._shown.end()
