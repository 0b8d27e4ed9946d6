"""How far the job of an output folder is, by what lies there: rows, attempts, revisions.

Changes nothing, works while the job runs, and needs neither job file nor input nor model.
"""

import dataclasses
import datetime
from typing import Any, Literal

from jaxpaged.job.look import attempt_status, presence
from jaxpaged.job.look.attempt_status import AttemptStatus, LiveFigures
from jaxpaged.job.look.committed_rows import CommittedRows, RevisionStatus
from jaxpaged.job.output import attempt, history
from jaxpaged.storage.store import Store

State = Literal[
    "running",
    "finished",
    "retry unfinished",
    "stopped",
    "too many row errors",
    "failed",
    "killed",
    "unfinished",
    "never ran",
]
"""How things stand. The four from "stopped" to "killed" (it ended without a word) say how the last
attempt ended; "unfinished", that no attempt says why parts are missing, or the mark of the end."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """How things stand.

    Attributes:
        place: The folder.
        state: In a word.
        created: When the job began; None if it never did.
        rows: Rows of the job.
        rows_committed: Rows in committed parts.
        rows_waiting: Finished rows that are in no part yet: in the journal or, while the job
            runs, in the running process.
        finish_reasons: Committed rows by finish reason.
        errors: Committed rows that failed, by error code.
        tokens: Sums over committed rows by kind: prompt, completion, cached.
        parts: Parts of the job.
        parts_committed: Committed ones.
        bad_records: Commit records that cannot be read; their rows are in none of the sums.
        attempts: All runs so far, in order.
        revisions: Later changes of the folder, in order.
        live: Figures of the running attempt; None if none runs, and before it gave any.
    """

    place: str
    state: State
    created: str | None = None
    rows: int = 0
    rows_committed: int = 0
    rows_waiting: int = 0
    finish_reasons: dict[str, int] = dataclasses.field(default_factory=dict)
    errors: dict[str, int] = dataclasses.field(default_factory=dict)
    tokens: dict[str, int] = dataclasses.field(default_factory=dict)
    parts: int = 0
    parts_committed: int = 0
    bad_records: int = 0
    attempts: tuple[AttemptStatus, ...] = ()
    revisions: tuple[RevisionStatus, ...] = ()
    live: LiveFigures | None = None

    @property
    def last_error(self) -> AttemptStatus | None:
        """The latest attempt that ended in an error."""
        errors = ("failed", "too many row errors")
        return next((one for one in reversed(self.attempts) if one.state in errors), None)

    def to_json(self) -> dict[str, Any]:
        """The attributes in JSON's types, and `last_error`, that attempt's message or null.

        An attempt has number, host, pid, began, state, message and ended; a revision number, kind,
        created, rows, where, settings and is_finished; `live`, if it is not null, has rows, total,
        errors, skipped, rows_per_second, tokens_per_second, seconds_left and seconds_silent.
        """
        error = self.last_error
        return {**dataclasses.asdict(self), "last_error": None if error is None else error.message}


def status(store: Store, now: datetime.datetime | None = None) -> Status:
    """Looks at an output folder.

    Args:
        store: The folder.
        now: The moment to reckon with; None for this one.

    Raises:
        OutputConflictError: Its history cannot be understood.
        StorageError: It cannot be read.
    """
    now = now or datetime.datetime.now(datetime.UTC)
    facts = attempt.all_attempts(store)
    last = facts[-1] if facts else None
    is_running = presence.is_running(store, last, now)
    runs = tuple(
        attempt_status.describe(one, is_running=is_running and one is last) for one in facts
    )
    found = Status(
        place=store.url,
        state="running" if is_running else _end_state(runs),
        attempts=runs,
        live=attempt_status.live_figures(last, now) if is_running and last else None,
    )
    known = history.read(store)
    if known is None:
        return found
    return _with_rows(found, CommittedRows(store, known), created=known.job.created)


def _with_rows(found: Status, rows: CommittedRows, *, created: str) -> Status:
    """The same with what is committed, and with what that says of a job that does not run."""
    state = found.state
    if state == "running":
        # In a retry the figures are about the rows that are redone.
        live = None if rows.has_open_retry else found.live
        waiting = 0 if live is None else max(0, live.rows - rows.num_rows)
    else:
        waiting = rows.num_journaled()
        if rows.is_finished:
            state = "finished"
        elif rows.has_open_retry:
            state = "retry unfinished"
        elif state == "never ran" and rows.num_parts:
            state = "unfinished"
    return dataclasses.replace(
        found,
        state=state,
        created=created,
        rows=rows.units.num_rows,
        rows_committed=rows.num_rows,
        rows_waiting=waiting,
        finish_reasons=rows.counts.finish_reasons,
        errors=rows.counts.errors,
        tokens=rows.counts.tokens,
        parts=len(rows.units),
        parts_committed=rows.num_parts,
        bad_records=rows.num_bad,
        revisions=rows.revisions,
    )


def _end_state(runs: tuple[AttemptStatus, ...]) -> State:
    """How the last attempt ended."""
    match runs[-1].state if runs else "never ran":
        case ("stopped" | "too many row errors" | "failed" | "killed" | "never ran") as state:
            return state
    return "unfinished"
