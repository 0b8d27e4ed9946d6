"""Runs a job: looks at its input and output, completes what is left, reports."""

import dataclasses
from collections.abc import Callable

from jaxpaged.errors import OutputConflictError
from jaxpaged.job import planned_job, report
from jaxpaged.job.completion_engine import CompletionEngine
from jaxpaged.job.counted_report import RunEnd
from jaxpaged.job.live_progress import LiveProgress
from jaxpaged.job.look import verify
from jaxpaged.job.output import output_view
from jaxpaged.job.output.attempt import Attempt
from jaxpaged.job.output.output_folder import OutputFolder, Recovery
from jaxpaged.job.pipeline import Work
from jaxpaged.job.planned_job import PlannedJob, RunOptions
from jaxpaged.job.progress import Progress, SilentProgress
from jaxpaged.job.report import JobReport
from jaxpaged.job.run import Run, make_report
from jaxpaged.job.spec import JobSpec
from jaxpaged.job.tally import Tally


def run_job(
    spec: JobSpec,
    *,
    engine: CompletionEngine | None = None,
    progress: Progress | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    options: RunOptions | None = None,
) -> JobReport:
    """Completes every row of the job's input; returns what it gave.

    A job that is already finished is only reported. One that ended early, however it ended,
    continues: committed parts stay, finished rows of the others come from the journal.

    Args:
        spec: The job.
        engine: Completes the prompts, with its own model, sizes and seed; None loads the job's.
            The folder remembers the job's model in either case.
        progress: Is told how far the job is; None shows nothing.
        should_stop: Asked before every step; true ends the job early, keeping finished rows.
        options: Whether to take in new input files, repair the output, hash the weights.

    Raises:
        ConfigError: The job cannot be run as it is written, or its output not be written.
        InputSchemaError: The input is missing, broken, changed, or not what the job needs.
        CapacityError: The model does not fit.
        IdentityError: The output folder holds results of a job that differs.
        OutputConflictError: The output folder is not ours, is damaged, or another process writes
            to it.
        StorageError: The output cannot be read or written.
        TooManyRowErrors: More rows failed than `max_errors` allows.
        JobInterrupted: `should_stop` said so.
    """
    options = options or RunOptions()
    live = LiveProgress(progress or SilentProgress())
    job = planned_job.plan(spec, options, note=live.note)
    if job.is_finished and not options.repairs:
        return known_report(job)
    check_model(job, engine)
    with (
        Attempt(job.store, live.facts) as attempt,
        OutputFolder(
            job.store,
            attempt,
            schema=job.columns.output,
            scoring=spec.eval,
            adapters=spec.adapter_choice(),
        ) as folder,
    ):
        folder.claim(job.seen, job.history)
        if options.repairs:
            _repair(job, folder, live)
        recovery = folder.recover(job.units)
        work = _work(job, recovery)
        return Run(job, folder, live, should_stop).complete(work, recovery, engine)


def known_report(job: PlannedJob) -> JobReport:
    """The report of a finished job: the one in its folder, or a new one if that is lost."""
    known = report.from_json(output_view.read_json(job.store, output_view.REPORT))
    if known is None:
        return make_report(job, RunEnd(state="already finished"))
    # The folder may have been moved since.
    output = dataclasses.replace(known.output, path=job.store.url)
    has_page = job.store.modified(output_view.PAGE) is not None
    return dataclasses.replace(known, state="already finished", output=output, has_page=has_page)


def check_model(job: PlannedJob, engine: CompletionEngine | None) -> None:
    """Finds what is wrong with the model before the output folder is made.

    Raises:
        ConfigError: A setting or a prompt does not suit the model, or its files are not right.
    """
    if engine is None:
        job.check_model()
    tokenizer = engine.tokenizer if engine else job.checkpoint.tokenizer()
    job.prompt_builder(tokenizer)


def _work(job: PlannedJob, recovery: Recovery) -> Work:
    """The units that have no part yet."""
    records = output_view.current_records(job.store, sorted(recovery.committed))
    pending = output_view.pending_retry(job.store, job.history)
    left = [unit for unit in job.units if unit.index not in recovery.committed]
    if pending is not None and not left:
        raise OutputConflictError(
            f"output.path: revision {pending.number} of {job.store.url} (retry of rows where "
            f"{pending.where}) is not finished; finish it first: jaxpaged retry {job.store.url}"
        )
    if pending is None:
        output_view.check_committed(job.store, records, job.units, job.history)
    done = Tally(job.spec.eval)
    for record in records:
        done.add_counts(record.counts)
    return Work(
        units=left,
        total=job.inputs.num_rows,
        done=done.num_rows,
        errors=done.num_errors,
        examples=done.examples(),
        skipped=done.finish_reasons["skipped"],
    )


def _repair(job: PlannedJob, folder: OutputFolder, progress: Progress) -> None:
    """Takes back the commits of all units that do not verify."""
    for index in sorted(verify.verify(job.store).rejected):
        progress.note(f"{job.units[index].part_name} does not verify; its rows are made again")
        folder.discard(job.units[index])
