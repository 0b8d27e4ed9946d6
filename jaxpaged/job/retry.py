"""Redoes chosen rows of a finished job as a new revision; all others stay bit for bit.

The rows are chosen by what their completions came to. Part by part the new revision takes the
place of the one before it, each row being visible once at every moment; replaced parts are kept
out of sight.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxpaged.errors import ConfigError, OutputConflictError
from jaxpaged.job import planned_job, runner, spec_file
from jaxpaged.job.completion_engine import CompletionEngine
from jaxpaged.job.filter.row_filter import RowFilter
from jaxpaged.job.live_progress import LiveProgress
from jaxpaged.job.output import history, identity, output_view, parent_rows
from jaxpaged.job.output.attempt import Attempt
from jaxpaged.job.output.history import History, Revision
from jaxpaged.job.output.output_folder import OutputFolder, Recovery
from jaxpaged.job.output.parent_rows import ParentRows
from jaxpaged.job.pipeline import Work
from jaxpaged.job.planned_job import PlannedJob, RunOptions
from jaxpaged.job.progress import Progress, SilentProgress
from jaxpaged.job.report import JobReport
from jaxpaged.job.run import Run
from jaxpaged.job.spec import JobSpec
from jaxpaged.job.units import Unit
from jaxpaged.storage import access
from jaxpaged.storage.disk import Disk
from jaxpaged.storage.options import StorageOptions
from jaxpaged.storage.store import Store

# What decides the rows is written into the revision; the rest holds for one run.
_CHANGEABLE = ("sampling.", "engine.max_model_len", "seed", "input.max_prompt_bytes")
_NOT_CHANGEABLE = (
    *("sampling.columns", "sampling.n", "sampling.best_of", "sampling.beam_width"),
    *("sampling.logprobs", "sampling.prompt_logprobs"),
)
_OF_THE_RUN = (
    *("engine.max_num_seqs", "engine.max_num_batched_tokens", "engine.block_size"),
    *("engine.num_blocks", "engine.memory_utilization", "engine.prefix_cache"),
    *("engine.preemption", "engine.swap_space"),
    *("max_errors", "input.path", "output.durability", "output.journal_interval"),
    "output.report_samples",
)


def retry_job(
    place: str,
    *,
    where: str | None = None,
    settings: Sequence[str] = (),
    storage: StorageOptions | None = None,
    disk: Disk | None = None,
    engine: CompletionEngine | None = None,
    progress: Progress | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> JobReport | None:
    """Redoes the rows that a condition chooses; returns what the job gives now.

    A retry that ended early is continued by the same call, or by one without a condition.

    Args:
        place: The output of a finished job: a folder's absolute path, or a URL.
        where: The condition over the output's columns; see `RowFilter`.
        settings: `key=value` strings that change the job for these rows, or how this run runs.
        storage: How object stores are reached; None for what the environment says of the output,
            and what the job used for its input.
        disk: How local output is written; None for the real disk.
        engine: Completes the prompts; None loads the job's.
        progress: Is told how far the run is.
        should_stop: Asked before every step; true ends the run early.

    Returns:
        The report; None if no row is chosen.

    Raises:
        ConfigError: The condition or a setting is wrong, or one may not change in a retry.
        OutputConflictError: The folder holds no finished job, or another retry that is not
            finished.
        JobError: As `run_job` raises them.
    """
    changes, for_the_run = _parse(settings)
    job = planned_job.plan(
        _spec(place, storage, for_the_run),
        RunOptions(disk=disk),
        note=(progress or SilentProgress()).note,
    )
    known = job.seen
    if known is None:
        raise OutputConflictError(f"{place}: holds no results of a job; run one first")
    pending = _unfinished(job, known)
    if pending is not None and _is_other(pending, where, changes):
        _check_withdrawable(pending, job.store)
        job = dataclasses.replace(job, history=known.without_last())
        pending = None
    if pending is None:
        pending = _begin(job, where, changes)
        if pending is None:
            return None
        job = dataclasses.replace(job, history=job.history.followed_by(pending))
    spec = _spec(place, storage, {**for_the_run, **pending.settings})
    job = dataclasses.replace(job, spec=spec)
    runner.check_model(job, engine)
    live = LiveProgress(progress or SilentProgress())
    with (
        Attempt(job.store, live.facts) as attempt,
        OutputFolder(
            job.store,
            attempt,
            schema=job.columns.output,
            scoring=job.spec.eval,
            adapters=job.spec.adapter_choice(),
        ) as folder,
    ):
        folder.claim(known, job.history)
        recovery = folder.recover_retry(_units(job, pending))
        work = _work(job, pending, recovery)
        return Run(job, folder, live, should_stop).complete(work, recovery, engine)


def _unfinished(job: PlannedJob, known: History) -> Revision | None:
    """The retry to go on with: one that has units left, or only `_SUCCESS` to write."""
    pending = output_view.pending_retry(job.store, known)
    if pending is None and known.revisions and not job.is_finished:
        last = known.revisions[-1]
        return last if last.kind == "retry" else None
    return pending


def _begin(job: PlannedJob, where: str | None, changes: dict[str, Any]) -> Revision | None:
    """The revision that a new retry makes; None if it chooses no row."""
    if where is None:
        raise ConfigError(
            "--where: is missing; say which rows to redo, as in "
            "--where \"finish_reason = 'length'\""
        )
    if not output_view.is_complete(job.store, job.units):
        raise OutputConflictError(
            f"{job.store.url}: the job is not finished, so that nobody knows what all rows came "
            "to; finish it first with `jaxpaged run`"
        )
    _check_committed(job)
    chosen = RowFilter.parse(where, job.columns.output)
    counts = parent_rows.count_chosen(job.store, job.units, chosen)
    if not counts:
        return None
    return job.history.retry(
        where=where, settings=changes, units=sorted(counts), rows=sum(counts.values())
    )


def _work(job: PlannedJob, revision: Revision, recovery: Recovery) -> Work:
    """The units of the revision that are left."""
    _check_committed(job)
    chosen = RowFilter.parse(revision.where, job.columns.output)
    left = [unit for unit in _units(job, revision) if unit.index not in recovery.committed]
    num_left = sum(parent_rows.count_chosen(job.store, left, chosen).values())
    return Work(
        units=left,
        total=revision.rows,
        done=revision.rows - num_left,
        errors=0,
        parent=ParentRows(job.store, left, chosen),
    )


def _check_committed(job: PlannedJob) -> None:
    records = output_view.current_records(job.store, range(len(job.units)))
    output_view.check_committed(job.store, records, job.units, job.history)


def _units(job: PlannedJob, revision: Revision) -> list[Unit]:
    return [
        dataclasses.replace(
            job.units[index], revision=revision.number, fingerprint=revision.fingerprint
        )
        for index in revision.units
    ]


def _spec(place: str, storage: StorageOptions | None, settings: Mapping[str, Any]) -> JobSpec:
    """The job that a folder remembers, changed."""
    options = storage or StorageOptions()
    store = access.open_store(place, options, private=output_view.PRIVATE)
    known = history.read(store)
    if known is None:
        raise OutputConflictError(f"{store.url}: no job of jaxpaged's wrote here")
    job = identity.spec_of(known.job)
    for key, value in {"output.path": store.url, **settings}.items():
        spec_file.put(job, key, value)
    if storage is not None:
        job["storage"] = storage.model_dump(exclude_none=True)
    return JobSpec.from_dict(job)


def _parse(settings: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is set for the chosen rows, and what for this run alone."""
    given = dict(spec_file.parse_override(text) for text in settings)
    for_the_run = {key: value for key, value in given.items() if key in _OF_THE_RUN}
    changes = {key: value for key, value in given.items() if key not in _OF_THE_RUN}
    for key in changes:
        if not key.startswith(_CHANGEABLE) or key.startswith(_NOT_CHANGEABLE):
            allowed = ", ".join(name.removesuffix(".") for name in _CHANGEABLE)
            raise ConfigError(
                f"--set {key}: cannot change in a retry, whose rows lie beside the others; what "
                f"can: {allowed}, and for the run itself {', '.join(_OF_THE_RUN)}"
            )
    return changes, for_the_run


def _is_other(pending: Revision, where: str | None, changes: dict[str, Any]) -> bool:
    """Whether a command asks for another retry than the one that is not finished."""
    is_same = where == pending.where and changes == pending.settings
    return not is_same and (where is not None or bool(changes))


def _check_withdrawable(pending: Revision, store: Store) -> None:
    if output_view.is_settled(store, pending):
        settings = "".join(f" --set {key}={value}" for key, value in pending.settings.items())
        raise OutputConflictError(
            f"{store.url}: revision {pending.number}, another retry, is not finished (--where "
            f'"{pending.where}"{settings}); finish it first with `jaxpaged retry {store.url}`'
        )
