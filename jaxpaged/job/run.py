"""One run of a job on a folder that this process holds: what is left is completed and committed.

A first run, a resumed one, a repair and a retry differ in their units only. The one module of the
job layer that loads an engine, and with it JAX, and only when rows are left to complete.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable

from jaxpaged.errors import ConfigError, JobError, TooManyRowErrors
from jaxpaged.job import counted_report, process_memory
from jaxpaged.job.completion_engine import CompletionEngine
from jaxpaged.job.counted_report import JobFolder, RunEnd
from jaxpaged.job.feeder import Sample
from jaxpaged.job.html import job_page
from jaxpaged.job.interrupt import JobInterrupted
from jaxpaged.job.output import output_view
from jaxpaged.job.output.journal import Journal
from jaxpaged.job.output.output_folder import OutputFolder, Recovery
from jaxpaged.job.output.writer import PartWriter
from jaxpaged.job.pipeline import Pipeline, Work, check_errors
from jaxpaged.job.planned_job import PlannedJob
from jaxpaged.job.progress import Progress
from jaxpaged.job.report import JobReport, JobState, RunFacts
from jaxpaged.job.tally import Tally


class Run:
    """One run.

    Args:
        job: The job.
        folder: Its output folder.
        progress: Is told how far the run is.
        should_stop: Asked before every step; true ends the run.

    Raises:
        OutputConflictError: A commit record of the folder cannot be read.
    """

    def __init__(
        self,
        job: PlannedJob,
        folder: OutputFolder,
        progress: Progress,
        should_stop: Callable[[], bool],
    ) -> None:
        self._job = job
        self._folder = folder
        self._progress = progress
        self._should_stop = should_stop
        self._tally = Tally(job.spec.eval, adapters=job.spec.adapter_choice())
        self._facts = RunFacts(attempt=folder.attempt.number, revision=len(job.history.revisions))
        self._samples: tuple[Sample, ...] = ()

    def complete(
        self, work: Work, recovery: Recovery, engine: CompletionEngine | None
    ) -> JobReport:
        """Completes the rows that are left and marks the job as finished."""
        self._tell(recovery)
        try:
            self._complete(work, engine)
        except BaseException as error:
            state, message = end_state(error), str(error).splitlines()[0] if str(error) else ""
            self._folder.attempt.ends(state, message)
            # What ended the run matters more than its report, which a full disk refuses too.
            with contextlib.suppress(JobError):
                self._report(state, message)
            raise
        if pending := output_view.pending_retry(self._folder.store, self._job.history):
            self._progress.note(
                f"revision {pending.number} (retry of rows where {pending.where}) is to be "
                f"finished next: jaxpaged retry {self._folder.store.url}"
            )
            self._folder.attempt.ends("retry unfinished")
            return self._report("retry unfinished")
        result = self._report("finished")
        summary = {"rows": result.output.rows, "row_errors": result.num_errors}
        self._folder.finish(self._job.history, {**summary, "parts": result.output.parts})
        self._folder.attempt.ends("finished")
        return result

    def _tell(self, recovery: Recovery) -> None:
        for note in self._job.store.notes:
            self._progress.note(note)
        for name in recovery.adopted:
            self._progress.note(f"{name} was whole, and is committed now")
        for name in recovery.removed:
            self._progress.note(f"{name} was not whole and never committed; it is made again")
        self._facts = dataclasses.replace(
            self._facts,
            parts_kept=len(recovery.committed),
            parts_adopted=len(recovery.adopted),
            parts_discarded=len(recovery.removed),
        )

    def _complete(self, work: Work, engine: CompletionEngine | None) -> None:
        units = list(work.units)
        with PartWriter(self._folder) as writer:
            for unit in (unit for unit in units if not unit.num_rows):
                writer.write(unit, self._folder.schema.empty_table())
                writer.commit(unit)
        journal = Journal(self._folder.store, interval=self._job.spec.output.journal_interval)
        journal.load({unit.index: unit for unit in units}.get)
        check_errors(self._job, work.errors, work.examples)
        if not any(unit.num_rows for unit in units):
            return
        self._run_pipeline(dataclasses.replace(work, units=units), journal, engine)

    def _run_pipeline(self, work: Work, journal: Journal, engine: CompletionEngine | None) -> None:
        started = time.perf_counter()
        engine = engine or self._load_engine()
        self._progress.note(engine.description)
        pipeline = Pipeline(
            self._job, work, engine, journal=journal, tally=self._tally, progress=self._progress
        )
        loaded = time.perf_counter()
        try:
            pipeline.run(self._folder, self._should_stop)
        finally:
            feeder = pipeline.feeder
            self._samples = feeder.samples
            self._facts = dataclasses.replace(
                self._facts,
                rows=feeder.num_rows - feeder.num_resumed,
                rows_resumed=feeder.num_resumed,
                row_errors=feeder.num_errors,
                rows_skipped=feeder.num_skipped,
                rows_with_special_text=feeder.num_special,
                rows_ending_in_answer=feeder.num_answered,
                load_seconds=loaded - started,
                seconds=time.perf_counter() - loaded,
                pool=engine.description,
                peak_memory_bytes=process_memory.peak_bytes(),
                engine=dataclasses.asdict(engine.stats),
                slow_rows=feeder.slow_rows.slowest(),
                timeline=pipeline.timeline.timeline(),
            )

    def _load_engine(self) -> CompletionEngine:
        # Here and nowhere else: everything before this line runs without JAX.
        from jaxpaged.engine import Engine

        self._progress.note(f"loading {self._job.spec.model}")
        spec = self._job.spec
        # By its path: the name of a model may lead elsewhere by now.
        path = self._job.checkpoint.path
        return Engine.load(path, spec.engine_config(), adapters=spec.adapters)

    def _report(self, state: JobState, message: str = "") -> JobReport:
        end = RunEnd(state=state, message=message, facts=self._facts, samples=self._samples)
        result = make_report(self._job, end)
        self._folder.write_report(result.to_json())
        page = self._page(result)
        if page is not None:
            self._folder.write_page(page)
        return dataclasses.replace(result, has_page=page is not None)

    def _page(self, result: JobReport) -> str | None:
        """The report as a page; None if that cannot be made here."""
        if not self._job.spec.output.report_samples:
            result = dataclasses.replace(result, samples=())
        try:
            return job_page.render(result)
        except ConfigError as error:
            self._progress.note(f"{output_view.PAGE} is not written: {error}")
        except Exception as error:
            # A picture that cannot be drawn must not cost a job that is done.
            self._progress.note(f"{output_view.PAGE} is not written, by a bug: {error!r}")
        return None


def make_report(job: PlannedJob, run: RunEnd) -> JobReport:
    """The report of a job as its folder stands.

    Raises:
        OutputConflictError: A record cannot be read.
        StorageError: The folder cannot be read.
    """
    folder = JobFolder(store=job.store, history=job.history, units=job.units, spec=job.spec)
    return counted_report.make(folder, run)


def end_state(error: BaseException) -> JobState:
    """How a run ended that was ended by an error."""
    if isinstance(error, JobInterrupted | KeyboardInterrupt):
        return "stopped"
    return "too many row errors" if isinstance(error, TooManyRowErrors) else "failed"
