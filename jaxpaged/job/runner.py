"""Runs a job: looks at its input and output, completes what is left, reports.

The one module of the job layer that loads an engine, and with it JAX, and only when rows are left
to complete.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator

from jaxpaged.errors import JobError, TooManyRowErrors
from jaxpaged.job import output_folder, planned_job, report, versions
from jaxpaged.job.completion_engine import CompletionEngine
from jaxpaged.job.feeder import Sample
from jaxpaged.job.interrupt import JobInterrupted
from jaxpaged.job.output_folder import OutputFolder
from jaxpaged.job.pipeline import Pipeline, check_errors
from jaxpaged.job.planned_job import PlannedJob
from jaxpaged.job.progress import Progress, SilentProgress
from jaxpaged.job.prompts import PromptBuilder
from jaxpaged.job.report import JobReport, JobState, OutputFacts, RunFacts
from jaxpaged.job.spec import JobSpec
from jaxpaged.job.tally import Tally
from jaxpaged.job.units import Unit
from jaxpaged.job.writer import PartWriter


def run_job(
    spec: JobSpec,
    *,
    engine: CompletionEngine | None = None,
    progress: Progress | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> JobReport:
    """Completes every row of the job's input; returns what it gave.

    A job that is already finished is only reported. One that ended early continues behind its
    finished parts.

    Args:
        spec: The job.
        engine: Completes the prompts, with its own model, sizes and seed; None loads the job's.
            The folder remembers the job's model in either case.
        progress: Is told how far the job is; None shows nothing.
        should_stop: Asked before every step; true ends the job early, keeping finished parts.

    Raises:
        ConfigError: The job cannot be run as it is written, or its output not be written.
        InputSchemaError: The input is missing, broken, or not what the job needs.
        CapacityError: The model does not fit.
        IdentityError: The output folder holds parts of a job that differs.
        OutputConflictError: The output folder is not ours, or another process writes to it.
        TooManyRowErrors: More rows failed than `max_errors` allows.
        JobInterrupted: `should_stop` said so.
    """
    job = planned_job.plan(spec)
    progress = progress or SilentProgress()
    if output_folder.is_finished(job.output, job.record, job.units):
        known = report.from_json(output_folder.read_report(job.output))
        if known is not None:
            # The folder may have been moved since.
            output = dataclasses.replace(known.output, path=str(job.output))
            return dataclasses.replace(known, state="already finished", output=output)
        # The report is lost, the parts are not: they are counted again below.
    _check_model(job, engine)
    with OutputFolder(job.output) as folder:
        return _Run(job, folder, progress, should_stop).complete(engine)


def _check_model(job: PlannedJob, engine: CompletionEngine | None) -> None:
    """Finds what is wrong with the model before the output folder is made.

    Raises:
        ConfigError: A setting or a prompt does not suit the model, or its files are not right.
    """
    if engine is None:
        job.check_model()
    tokenizer = engine.tokenizer if engine else job.checkpoint.tokenizer()
    PromptBuilder(job.spec, tokenizer, job.inputs.schema.names)


class _Run:
    """One run of a job, on a folder that this process holds."""

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
        self._tally = Tally(job.spec.eval)
        self._facts = RunFacts()
        self._samples: tuple[Sample, ...] = ()

    def complete(self, engine: CompletionEngine | None) -> JobReport:
        """Completes the rows that are left and marks the job as finished."""
        job = self._job
        self._folder.claim(job.record, job.units)
        kept, discarded = self._folder.finished_units(job.units, job.columns.output)
        for name in discarded:
            self._progress.note(f"{name} is damaged and is completed again")
        self._facts = RunFacts(parts_kept=len(kept), parts_discarded=len(discarded))
        try:
            for index in sorted(kept):
                self._tally.add_part(job.output / job.units[index].part_name)
            if len(kept) < len(job.units):
                self._complete_units((u for u in job.units if u.index not in kept), engine)
        except Exception as error:
            # What ended the job matters more than its report, which a full disk refuses too.
            with contextlib.suppress(JobError):
                self._report(_end_state(error))
            raise
        result = self._report("finished")
        summary = {"rows": result.output.rows, "row_errors": result.num_errors}
        self._folder.finish({**summary, "parts": result.output.parts})
        return result

    def _complete_units(self, units: Iterator[Unit], engine: CompletionEngine | None) -> None:
        job = self._job
        if job.inputs.num_rows == 0:
            with PartWriter(self._folder, job.columns.output) as writer:
                writer.write(job.units[0], job.columns.output.empty_table())
            return
        check_errors(job, self._tally.num_errors, self._tally.examples())
        started = time.perf_counter()
        engine = engine or self._load_engine()
        self._progress.note(engine.description)
        pipeline = Pipeline(job, units, tally=self._tally, engine=engine, progress=self._progress)
        loaded = time.perf_counter()
        try:
            pipeline.run(self._folder, self._should_stop)
        finally:
            self._samples = pipeline.feeder.samples
            self._facts = dataclasses.replace(
                self._facts,
                rows=pipeline.feeder.num_rows,
                row_errors=pipeline.feeder.num_errors,
                rows_with_special_text=pipeline.feeder.num_special,
                load_seconds=loaded - started,
                seconds=time.perf_counter() - loaded,
                pool=engine.description,
                engine=dataclasses.asdict(engine.stats),
            )

    def _load_engine(self) -> CompletionEngine:
        # Here and nowhere else: everything before this line runs without JAX.
        from jaxpaged.engine import Engine

        self._progress.note(f"loading {self._job.spec.model}")
        return Engine.load(self._job.spec.model, self._job.spec.engine_config())

    def _report(self, state: JobState) -> JobReport:
        job, tally = self._job, self._tally
        scores = tally.scores()
        output = OutputFacts(
            path=str(job.output),
            parts=sum(1 for _ in job.output.glob("part-*.parquet")),
            rows=tally.num_rows,
            finish_reasons=dict(tally.finish_reasons),
            prompt_tokens=tally.tokens["prompt"],
            completion_tokens=tally.tokens["completion"],
            cached_tokens=tally.tokens["cached"],
            partial_characters=tally.num_partial_characters,
        )
        result = JobReport(
            state=state,
            input_rows=job.inputs.num_rows,
            output=output,
            errors=tally.errors(),
            scores=scores,
            run=self._facts,
            warnings=report.warnings(
                output, self._facts, job.spec, input_rows=job.inputs.num_rows, scores=scores
            ),
            job=job.spec.model_dump(mode="json"),
            versions=versions.installed(),
            samples=self._samples,
        )
        self._folder.write_report(result.to_json())
        return result


def _end_state(error: Exception) -> JobState:
    if isinstance(error, JobInterrupted):
        return "stopped"
    return "too many row errors" if isinstance(error, TooManyRowErrors) else "failed"
