"""What the records of an attempt tell a reader: who ran, how it ended, how far it is.

Takes nothing in those records for granted, for they may be of any moment.
"""

import dataclasses
import datetime
import math
from collections.abc import Mapping

from jaxpaged.job.look import presence
from jaxpaged.job.output.attempt import AttemptFacts


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStatus:
    """One run of the job.

    Attributes:
        number: 1, 2, ...
        host: Where it ran.
        pid: Its process id there.
        began: When it began.
        state: How it ended; "running" if it has not, "killed" if it ended without a word.
        message: Why it ended, if it said so.
        ended: When it ended, if it said so.
    """

    number: int
    host: str | None
    pid: int | None
    began: str | None
    state: str
    message: str
    ended: str | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LiveFigures:
    """The figures of a running attempt at its last sign of life.

    Attributes:
        rows: Rows with a result; in a retry, of those that are redone.
        total: Rows to complete; in a retry, to redo.
        errors: Failed rows among them.
        rows_per_second: Over the last minute.
        tokens_per_second: Completion tokens over the last minute.
        seconds_left: How long the rest takes at that rate; None if nobody knows.
        seconds_silent: How long ago the sign of life was.
        skipped: Rows that were passed over.
    """

    rows: int
    total: int
    errors: int
    rows_per_second: float
    tokens_per_second: float
    seconds_left: float | None
    seconds_silent: float
    skipped: int = 0


def describe(facts: AttemptFacts, *, is_running: bool) -> AttemptStatus:
    """What is known of an attempt."""
    pid = _number(facts.begin, "pid")
    end = facts.end or {}
    state = _text(end, "state") or ("running" if is_running else "killed")
    return AttemptStatus(
        number=facts.number,
        host=_text(facts.begin, "host"),
        pid=None if pid is None else int(pid),
        began=_text(facts.begin, "began"),
        # An attempt that says nothing more than that was refused, or failed early.
        state="failed" if state == "ended" else state,
        message=_text(end, "message") or "",
        ended=_text(end, "ended"),
    )


def live_figures(facts: AttemptFacts, now: datetime.datetime) -> LiveFigures | None:
    """The figures of a running attempt; None before there are any."""
    beat = facts.beat
    rows, total = _number(beat, "rows"), _number(beat, "total")
    silent = presence.seconds_silent(facts, now)
    if rows is None or total is None or silent is None:
        return None
    return LiveFigures(
        rows=int(rows),
        total=int(total),
        errors=int(_number(beat, "errors") or 0),
        rows_per_second=_number(beat, "rows_per_second") or 0.0,
        tokens_per_second=_number(beat, "tokens_per_second") or 0.0,
        seconds_left=_number(beat, "seconds_left"),
        seconds_silent=silent,
        skipped=int(_number(beat, "skipped") or 0),
    )


def _number(values: Mapping[str, object], key: str) -> float | None:
    value = values.get(key)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _text(values: Mapping[str, object], key: str) -> str | None:
    value = values.get(key)
    return value if isinstance(value, str) else None
