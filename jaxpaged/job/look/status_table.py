"""How a job stands, on the terminal."""

from collections.abc import Iterator

import rich.box
import rich.console
import rich.table
import rich.text

from jaxpaged.job.look.attempt_status import AttemptStatus
from jaxpaged.job.look.committed_rows import RevisionStatus
from jaxpaged.job.look.status import Status
from jaxpaged.job.progress import duration
from jaxpaged.job.report_table import plain

_MAX_CHARS = 500
_MAX_ATTEMPTS = 10


def show(status: Status, console: rich.console.Console) -> None:
    """Prints the state, the counts, the attempts and the revisions."""
    table = rich.table.Table(box=rich.box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _lines(status):
        table.add_row(rich.text.Text(name), rich.text.Text(plain(value, _MAX_CHARS)))
    console.print(table)


def _lines(status: Status) -> Iterator[tuple[str, str]]:
    yield "output", status.place
    yield "state", _state(status)
    if status.created is not None:
        yield from _counts(status)
    yield from _live(status)
    if (error := status.last_error) is not None and status.state != "finished":
        yield "last error", f"attempt {error.number}: {error.message or 'it does not say what'}"
    for revision in status.revisions:
        yield f"revision {revision.number}", _revision(revision)
    hidden = len(status.attempts) - _MAX_ATTEMPTS
    if hidden > 0:
        yield "attempts", f"{hidden:,} earlier ones are in the JSON"
    for attempt in status.attempts[-_MAX_ATTEMPTS:]:
        yield f"attempt {attempt.number}", _attempt(attempt)


def _state(status: Status) -> str:
    last = status.attempts[-1] if status.attempts else None
    match status.state:
        case "killed" if last is not None:
            return f"killed: attempt {last.number} ended without a word; running it again continues"
        case "retry unfinished":
            return f"retry unfinished; `jaxpaged retry {status.place}` continues it"
        case "unfinished":
            return f"unfinished, and no attempt says why; see `jaxpaged verify {status.place}`"
        case "never ran":
            return "no job has run here"
    return status.state


def _counts(status: Status) -> Iterator[tuple[str, str]]:
    share = 100 * status.rows_committed / max(1, status.rows)
    rows = f"{status.rows_committed:,} of {status.rows:,} ({share:.0f}%) in committed parts"
    if status.rows_waiting:
        where = "finished by the running process" if status.live else "in the journal"
        rows += f", {status.rows_waiting:,} more {where}"
    yield "rows", rows
    for name, count in sorted(status.finish_reasons.items()):
        yield f"  {name}", f"{count:,}"
    for code, count in sorted(status.errors.items(), key=lambda item: -item[1]):
        yield f"    {code}", f"{count:,}"
    tokens = status.tokens
    yield "tokens", f"{tokens.get('prompt', 0):,} in, {tokens.get('completion', 0):,} out"
    yield "parts", f"{status.parts_committed:,} of {status.parts:,}"
    if status.bad_records:
        text = f"{status.bad_records:,} cannot be read; `jaxpaged verify {status.place}` names them"
        yield "commit records", text


def _live(status: Status) -> Iterator[tuple[str, str]]:
    if (live := status.live) is None:
        return
    left = "" if live.seconds_left is None else f", ETA {duration(live.seconds_left)}"
    skipped = f", {live.skipped:,} skipped" if live.skipped else ""
    yield "now", f"{live.rows:,}/{live.total:,} rows, {live.errors:,} errors{skipped}{left}"
    yield "rate", f"{live.rows_per_second:,.1f} rows/s, {live.tokens_per_second:,.0f} tokens/s out"
    yield "last heard of", f"{live.seconds_silent:,.0f} s ago"


def _revision(revision: RevisionStatus) -> str:
    state = "finished" if revision.is_finished else "not finished"
    text = f"{revision.kind}, {revision.rows:,} rows, {revision.created}, {state}"
    if revision.where:
        text += f", where {revision.where}"
    settings = ", ".join(f"{key}={value}" for key, value in revision.settings.items())
    return f"{text}, {settings}" if settings else text


def _attempt(attempt: AttemptStatus) -> str:
    host, pid, began = (value or "?" for value in (attempt.host, attempt.pid, attempt.began))
    ended = f" to {attempt.ended}" if attempt.ended else ""
    text = f"{attempt.state}, host {host}, process {pid}, {began}{ended}"
    return f"{text}: {attempt.message}" if attempt.message else text
