"""The report of an output folder, made again from what lies there: without job file, input, model.

What commit records and parts tell is counted anew; what only a run knew (its speed, its timeline)
is taken over from the report that the folder has.
"""

import dataclasses
import pathlib

from jaxpaged.errors import OutputConflictError, StorageError
from jaxpaged.job import counted_report, report, spec_file
from jaxpaged.job.counted_report import JobFolder, RunEnd
from jaxpaged.job.html import job_page
from jaxpaged.job.look import known_job, part_samples
from jaxpaged.job.look import status as looks
from jaxpaged.job.look.status import Status
from jaxpaged.job.output import attempt, identity, output_view
from jaxpaged.job.output.history import History
from jaxpaged.job.report import JobReport, JobState, RunFacts
from jaxpaged.job.spec import JobSpec
from jaxpaged.storage.store import Store


def rebuild(store: Store) -> JobReport:
    """The report as the folder stands; writes nothing.

    Raises:
        OutputConflictError: The folder holds no job, a job is running in it, or its records cannot
            be understood.
        StorageError: The folder cannot be read.
    """
    known, status = known_job.read(store), looks.status(store)
    if status.state == "running":
        raise _running(store)
    old = report.from_json(output_view.read_json(store, output_view.REPORT))
    spec = _spec(known, store)
    folder = JobFolder(store=store, history=known, units=known_job.units(known, store), spec=spec)
    shows_samples = spec.output.report_samples and _shows_samples(old)
    found = counted_report.make(
        folder,
        RunEnd(
            state=_state(status),
            message=_message(status),
            facts=old.run if old else RunFacts(),
            samples=part_samples.samples(folder) if shows_samples else (),
            versions=old.versions if old else None,
        ),
    )
    if old is not None:
        # The keys of the last run: those that decide no rows may differ from the first one's.
        found = dataclasses.replace(found, job=old.job)
    return dataclasses.replace(found, notes=(*found.notes, *_gaps(old, status)))


def write(store: Store) -> JobReport:
    """The same, written into the folder as `report.json` and `report.html`.

    Raises:
        ConfigError: matplotlib is not installed, or the folder cannot be written to.
        OutputConflictError: As `rebuild` raises it, or another process began to write there.
        StorageError: The folder cannot be read or written.
    """
    before = attempt.last_attempt(store)
    found = rebuild(store)
    page = job_page.render(found)
    if not store.lock():
        raise _running(store)
    try:
        if attempt.last_attempt(store) != before:
            raise _running(store)
        store.replace(output_view.REPORT, output_view.to_bytes(found.to_json()))
        store.replace(output_view.PAGE, page.encode())
    finally:
        store.unlock()
    return dataclasses.replace(found, has_page=True)


def write_page(store: Store, path: pathlib.Path) -> JobReport:
    """The same, as a page at a local path; the folder stays as it is.

    Raises:
        ConfigError: matplotlib is not installed.
        OutputConflictError: As `rebuild` raises it.
        StorageError: The folder cannot be read, or the path not be written.
    """
    found = rebuild(store)
    page = job_page.render(found)
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        reason = error.strerror or error
        raise StorageError(f"{path}: cannot be written: {reason}; name another file") from None
    return found


def _running(store: Store) -> OutputConflictError:
    return OutputConflictError(
        f"{store.url}: a job is running there, and writes its report when it ends; `jaxpaged "
        f"status {store.url}` shows how far it is"
    )


def _spec(known: History, store: Store) -> JobSpec:
    """The job that the folder remembers, wherever the folder lies now."""
    job = identity.spec_of(known.job)
    spec_file.put(job, "output.path", store.url)
    return JobSpec.from_dict(job)


def _shows_samples(old: JobReport | None) -> bool:
    """Whether the last run was allowed to show samples."""
    output = old.job.get("output") if old else None
    return not isinstance(output, dict) or output.get("report_samples") is not False


def _state(status: Status) -> JobState:
    match status.state:
        case "running" | "never ran":
            return "unfinished"
        case state:
            return state


def _message(status: Status) -> str:
    if status.state == "finished" or not status.attempts:
        return ""
    return status.attempts[-1].message or ""


def _gaps(old: JobReport | None, status: Status) -> list[str]:
    """What the folder cannot tell."""
    if old is None:
        return ["no report of a run is there: nothing is known of its speed and memory"]
    last = status.attempts[-1].number if status.attempts else old.run.attempt
    if last == old.run.attempt:
        return []
    return [
        f"attempt {last} left no report: what is said of a run is about attempt {old.run.attempt}"
    ]
