"""How far a running job is, remembered for other processes: the heartbeat of its attempt."""

import time
from collections.abc import Callable
from typing import Any

from jaxpaged.job import progress
from jaxpaged.job.progress import Progress, RecentRates, Snapshot

_SECONDS = 0.5


class LiveProgress:
    """Passes everything on and remembers how far the job is, for other processes to read.

    Args:
        shown: The progress that is shown.
        clock: Seconds; another one in tests.
    """

    def __init__(self, shown: Progress, clock: Callable[[], float] = time.monotonic) -> None:
        self._shown = shown
        self._clock = clock
        self._rates = RecentRates(clock)
        self._total = 0
        self._next = clock()
        self._last: Snapshot | None = None
        self._facts: dict[str, Any] = {}

    def facts(self) -> dict[str, Any]:
        """The latest state in JSON's types; may be asked in another thread."""
        return self._facts

    def note(self, text: str) -> None:
        """Passes it on."""
        self._shown.note(text)

    def begin(self, *, total: int, done: int, journaled: int) -> None:
        """Passes it on."""
        self._total = total
        self._shown.begin(total=total, done=done, journaled=journaled)

    def update(self, snapshot: Snapshot) -> None:
        """Passes it on; remembers it if the last one is old enough."""
        self._rates.add(snapshot)
        self._last = snapshot
        if self._clock() >= self._next:
            self._next = self._clock() + _SECONDS
            self._remember(snapshot)
        self._shown.update(snapshot)

    def end(self) -> None:
        """Passes it on; the last state is remembered in any case."""
        if self._last is not None:
            self._remember(self._last)
        self._shown.end()

    def _remember(self, snapshot: Snapshot) -> None:
        self._facts = progress.facts(snapshot, self._rates, self._total)
