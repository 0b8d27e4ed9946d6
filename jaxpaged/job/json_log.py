"""What a run says about itself, for machines: one JSON object a line.

    {"time": "2026-11-30T09:00:00.000+00:00", "level": "info", "event": "note", "message": "..."}

Each line has time, level (`info`, `warning` or `error`) and event; docs/live_metrics.md lists the
events with their fields.
"""

import contextlib
import datetime
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

from jaxpaged.job import progress
from jaxpaged.job.progress import RecentRates, Snapshot
from jaxpaged.job.report import JobReport, JobState

Level = Literal["info", "warning", "error"]

_PROGRESS_SECONDS = 10.0


class JsonLog:
    """Writes events; may be used in several threads.

    Args:
        write_line: Writes a line, and its end behind it.
    """

    def __init__(self, write_line: Callable[[str], None]) -> None:
        self._write_line = write_line
        self._lock = threading.Lock()

    def write(self, event: str, fields: Mapping[str, object], level: Level = "info") -> None:
        """Writes a line: an event with its fields, in JSON's types."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        values = {"time": now, "level": level, "event": event, **fields}
        # In ASCII, which every terminal has; line ends in messages are escaped.
        line = json.dumps(values, allow_nan=False)
        # Nobody may be reading any more: no reason to end the job.
        with self._lock, contextlib.suppress(OSError):
            self._write_line(line)

    def ends(self, result: JobReport | None, *, exit_code: int) -> None:
        """Writes the report's warnings, and as the last line how the run ended.

        Args:
            result: What the job gave; None for a retry that chose no row.
            exit_code: Of the process.
        """
        if result is None:
            self.write("end", {"state": "nothing to do", "exit_code": exit_code})
            return
        for warning in result.warnings:
            self.write("warning", {"message": warning}, "warning")
        ending = {
            "state": result.state,
            "exit_code": exit_code,
            "rows": result.output.rows,
            "errors": result.num_errors,
            "skipped": result.output.num_skipped,
            "path": result.output.path,
        }
        self.write("end", ending, "warning" if exit_code else "info")

    def fails(
        self, state: JobState, *, exit_code: int, message: str, traceback: str | None
    ) -> None:
        """Writes what ended the run, and as the last line how.

        Args:
            state: How it ended.
            exit_code: Of the process.
            message: What ended it.
            traceback: Where, if it was a bug.
        """
        level: Level = "warning" if state == "stopped" else "error"
        trace = {} if traceback is None else {"traceback": traceback}
        self.write(level, {"message": message, **trace}, level)
        self.write("end", {"state": state, "exit_code": exit_code}, level)

    @contextlib.contextmanager
    def takes_warnings(self) -> Iterator[None]:
        """Writes what Python code warns of inside a `with` statement, as events `log`."""
        handler = _Handler(self)
        logging.getLogger().addHandler(handler)
        logging.captureWarnings(True)
        try:
            yield
        finally:
            logging.captureWarnings(False)
            logging.getLogger().removeHandler(handler)


class JsonProgress:
    """Writes an event for all that a job reports, of its steps one every few seconds.

    Args:
        log: Where to write.
        clock: Seconds; another one in tests.
    """

    def __init__(self, log: JsonLog, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._rates = RecentRates(clock)
        self._total = 0
        self._next = clock()
        self._latest: Snapshot | None = None

    def note(self, text: str) -> None:
        """Writes the text."""
        self._log.write("note", {"message": text})

    def begin(self, *, total: int, done: int, journaled: int) -> None:
        """Writes what is to be done and what was done before."""
        self._total = total
        self._next = self._clock() + _PROGRESS_SECONDS
        self._log.write("begin", {"total": total, "done": done, "journaled": journaled})

    def update(self, snapshot: Snapshot) -> None:
        """Writes the state if the last one is old enough."""
        self._rates.add(snapshot)
        self._latest = snapshot
        if self._clock() >= self._next:
            self._next = self._clock() + _PROGRESS_SECONDS
            self._write(snapshot)

    def end(self) -> None:
        """Writes the last state."""
        if self._latest is not None:
            self._write(self._latest)

    def _write(self, snapshot: Snapshot) -> None:
        facts = progress.facts(snapshot, self._rates, self._total)
        rounded = {
            name: round(value, 3) if isinstance(value, float) else value
            for name, value in facts.items()
        }
        self._log.write("progress", rounded)


class _Handler(logging.Handler):
    """Passes warnings and errors of Python's own logging on."""

    def __init__(self, log: JsonLog) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        level: Level = "error" if record.levelno >= logging.ERROR else "warning"
        self._log.write("log", {"logger": record.name, "message": self.format(record)}, level)
