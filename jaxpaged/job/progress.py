"""How far a running job is, for people: a bar on a terminal, now and then a line elsewhere.

Knows numbers only, neither what the engine does nor the rows.
"""

import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import rich.console
import rich.live
import rich.progress
import rich.text

from jaxpaged.job.completion_engine import LiveStats
from jaxpaged.job.outcomes import Outcome

_RECENT_SECONDS = 60.0
_LINE_SECONDS = 10.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A job at one moment.

    Attributes:
        rows: Rows with a result, those of earlier runs included.
        resumed: Those of them that earlier runs finished.
        errors: Rows that failed.
        prompt_tokens: Computed by the engine so far, recomputed ones included.
        completion_tokens: Sampled by the engine so far.
        running: Requests that are being completed.
        waiting: Requests that wait for room.
        used_blocks: Blocks of the pool in use.
        num_blocks: Blocks of the pool.
        skipped: Rows that were passed over.
        outcomes: Rows of this run, resumed ones included, by how they ended; goes on counting.
        engine: The engine's counters, which go on too.
    """

    rows: int
    resumed: int
    errors: int
    prompt_tokens: int
    completion_tokens: int
    running: int
    waiting: int
    used_blocks: int
    num_blocks: int
    skipped: int = 0
    outcomes: Mapping[Outcome, int] | None = None
    engine: LiveStats | None = None

    @property
    def new_rows(self) -> int:
        """Rows that this run finished."""
        return self.rows - self.resumed

    def figures(self) -> dict[str, int]:
        """The numbers of this moment, by name."""
        return {name: getattr(self, name) for name in _FIGURES}


_FIGURES = tuple(
    field.name for field in dataclasses.fields(Snapshot) if field.name not in ("outcomes", "engine")
)


@runtime_checkable
class Progress(Protocol):
    """Where a job reports how far it is."""

    def note(self, text: str) -> None:
        """Something worth a line."""
        ...

    def begin(self, *, total: int, done: int, journaled: int) -> None:
        """The rows of the job, how many of them are in finished parts, and how many others
        earlier runs left in the journal."""
        ...

    def update(self, snapshot: Snapshot) -> None:
        """Called after every step."""
        ...

    def end(self) -> None:
        """No update follows."""
        ...


class SilentProgress:
    """Shows nothing."""

    def note(self, text: str) -> None:
        """Shows nothing."""

    def begin(self, *, total: int, done: int, journaled: int) -> None:
        """Shows nothing."""

    def update(self, snapshot: Snapshot) -> None:
        """Shows nothing."""

    def end(self) -> None:
        """Shows nothing."""


class LineProgress:
    """One plain line every few seconds, for logs.

    Args:
        console: Where to write.
        clock: Seconds; another one in tests.
    """

    def __init__(
        self, console: rich.console.Console, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._clock = clock
        self._rates = RecentRates(clock)
        self._total = 0
        self._next = clock()

    def note(self, text: str) -> None:
        """Writes the text."""
        _write(self._console, text)

    def begin(self, *, total: int, done: int, journaled: int) -> None:
        """Writes what was done before, if anything."""
        self._total = total
        if done or journaled:
            self.note(resumed_text(total=total, done=done, journaled=journaled))
        self._next = self._clock() + _LINE_SECONDS

    def update(self, snapshot: Snapshot) -> None:
        """Writes a line if the last one is old enough."""
        self._rates.add(snapshot)
        if self._clock() >= self._next:
            self._next = self._clock() + _LINE_SECONDS
            share = 100 * snapshot.rows / max(1, self._total)
            self.note(
                f"{snapshot.rows:,}/{self._total:,} rows ({share:.0f}%), "
                f"{describe(snapshot, self._rates, self._total)}"
            )

    def end(self) -> None:
        """Writes nothing."""


class BarProgress:
    """A bar that redraws itself, for terminals.

    Args:
        console: The terminal.
    """

    def __init__(self, console: rich.console.Console) -> None:
        self._rates = RecentRates(time.monotonic)
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.completed:,.0f}/{task.total:,.0f} rows"),
            rich.progress.BarColumn(),
            rich.progress.TaskProgressColumn(),
            console=console,
        )
        # Below the bar, where a narrow terminal has room for it too.
        self._state = rich.text.Text(style="dim", no_wrap=True, overflow="ellipsis")
        self._live = rich.live.Live(
            rich.console.Group(self._bar, self._state),
            console=console,
            transient=True,
            refresh_per_second=4,
        )
        self._console = console
        self._total = 0
        self._task: rich.progress.TaskID | None = None

    def note(self, text: str) -> None:
        """Writes the text above the bar."""
        _write(self._console, text)

    def begin(self, *, total: int, done: int, journaled: int) -> None:
        """Starts to draw."""
        self._total = total
        if done or journaled:
            self.note(resumed_text(total=total, done=done, journaled=journaled))
        self._task = self._bar.add_task("", total=total, completed=done)
        self._live.start()

    def update(self, snapshot: Snapshot) -> None:
        """Sets what the next redraw shows."""
        self._rates.add(snapshot)
        if self._task is not None:
            self._bar.update(self._task, completed=snapshot.rows)
            self._state.plain = describe(snapshot, self._rates, self._total)

    def end(self) -> None:
        """Removes the bar."""
        self._live.stop()


class RecentRates:
    """Rates over the last minute; the job's beginning, with its compiling, is soon forgotten."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._points: collections.deque[tuple[float, Snapshot]] = collections.deque()

    def add(self, snapshot: Snapshot) -> None:
        """Remembers a moment, at most a few for each second."""
        now = self._clock()
        if len(self._points) > 1 and now - self._points[-2][0] < 0.25:
            self._points.pop()
        self._points.append((now, snapshot))
        while now - self._points[0][0] > _RECENT_SECONDS:
            self._points.popleft()

    def per_second(self, name: str) -> float:
        """How fast one of the snapshot's counters grows."""
        (start, first), (end, last) = self._points[0], self._points[-1]
        seconds = end - start
        return (getattr(last, name) - getattr(first, name)) / seconds if seconds > 0 else 0.0

    def seconds_left(self, snapshot: Snapshot, total: int) -> float | None:
        """How long the rows that are left take; None before any is finished."""
        rows_per_second = self.per_second("new_rows")
        return (total - snapshot.rows) / rows_per_second if rows_per_second > 0 else None


def facts(snapshot: Snapshot, rates: RecentRates, total: int) -> dict[str, int | float | None]:
    """The job's state in JSON's types: its numbers, speed, time left."""
    return {
        "total": total,
        **snapshot.figures(),
        "rows_per_second": rates.per_second("new_rows"),
        "tokens_per_second": rates.per_second("completion_tokens"),
        "seconds_left": rates.seconds_left(snapshot, total),
    }


def resumed_text(*, total: int, done: int, journaled: int) -> str:
    """What earlier runs did, in words."""
    text = f"{done:,} of {total:,} rows are in finished parts"
    return f"{text}, {journaled:,} more in the journal" if journaled else text


def describe(snapshot: Snapshot, rates: RecentRates, total: int) -> str:
    """The job's state in a few words: speed, requests, pool, errors, time left."""
    pool = 100 * snapshot.used_blocks / max(1, snapshot.num_blocks)
    parts = [
        f"tokens/s {rates.per_second('prompt_tokens'):,.0f} in "
        f"{rates.per_second('completion_tokens'):,.0f} out",
        f"{snapshot.running} running {snapshot.waiting} waiting",
        f"pool {pool:.0f}%",
    ]
    if snapshot.resumed:
        parts.append(f"{snapshot.resumed:,} rows resumed")
    if snapshot.errors:
        parts.append(f"{snapshot.errors:,} errors")
    if snapshot.skipped:
        parts.append(f"{snapshot.skipped:,} skipped")
    if (seconds := rates.seconds_left(snapshot, total)) is not None:
        parts.append(f"ETA {duration(seconds)}")
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


def _write(console: rich.console.Console, text: str) -> None:
    # Nobody may be reading any more (a full disk; a closed pipe, for which rich ends the process):
    # no reason to end the job.
    with contextlib.suppress(OSError, SystemExit):
        console.print(text, markup=False, highlight=False, soft_wrap=True)
