"""A look at a job without running it: its columns and its first prompts as the model sees them.

Loads the tokenizer, neither weights nor JAX.
"""

import dataclasses

import rich.box
import rich.console
import rich.table
import rich.text

from jaxpaged.cache.capacity import (
    PoolCapacity,
    blocks_for,
    kv_bytes_per_token,
    longer_sequences,
)
from jaxpaged.errors import OutputConflictError
from jaxpaged.job import planned_job
from jaxpaged.job.input import reader
from jaxpaged.job.input.row_batch import Row
from jaxpaged.job.output import output_view
from jaxpaged.job.planned_job import PlannedJob, RunOptions
from jaxpaged.job.prompt.prompts import Prompt, PromptBuilder
from jaxpaged.job.prompt.row_fault import RowFault, RowSkipped
from jaxpaged.job.spec import JobSpec
from jaxpaged.job.units import Unit

_SHOWN_CHARS = 2000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PromptPreview:
    """One of the first prompts.

    Attributes:
        row: The row's address, for people.
        text: What is tokenized; empty for a row at fault or passed over.
        num_tokens: Its tokens; None for a row at fault or passed over.
        problem: What is wrong, or what a run would cut or pass over; None if nothing.
    """

    row: str
    text: str
    num_tokens: int | None
    problem: str | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """What was found.

    Attributes:
        job: The job and its input.
        prompts: The first prompts.
        warnings: What would keep the job from running as it is.
        exit_code: What a run would end with at once; 0 if it would start.
    """

    job: PlannedJob
    prompts: tuple[PromptPreview, ...]
    warnings: tuple[str, ...]
    exit_code: int


def validate(spec: JobSpec, num_rows: int) -> Validation:
    """Checks a job and makes the prompts of its first rows.

    Raises:
        ConfigError: The job, or the model's files, are not right, or do not suit each other.
        InputSchemaError: The input is missing, broken, or not what the job needs.
    """
    job = planned_job.plan(spec, RunOptions(looks_only=True))
    job.check_model()
    builder = job.prompt_builder(job.checkpoint.tokenizer())
    previews: list[PromptPreview] = []
    first = Unit(index=0, start=0, stop=min(num_rows, job.inputs.num_rows))
    for batch in reader.read(job.inputs, job.columns.needed, [first]):
        rows = batch.rows(builder.columns)
        previews += [_preview(row, builder, job) for row in rows]
    state, exit_code = look_at_output(job)
    problems = [f"{preview.row}: {preview.problem}" for preview in previews if preview.problem]
    return Validation(
        job=job,
        prompts=tuple(previews),
        warnings=(*problems, *_stretch(job), *state),
        exit_code=exit_code,
    )


def show(validation: Validation, console: rich.console.Console) -> None:
    """Prints what was found."""
    job = validation.job
    console.print(
        f"files: {len(job.inputs.files):,}, rows: {job.inputs.num_rows:,}, "
        f"parts: {len(job.units):,}",
        highlight=False,
    )
    for name, adapter in job.adapters.items():
        ranks = ", ".join(f"{part} {rank}" for part, rank in adapter.ranks.items())
        console.print(f"adapter {name}: ranks {ranks}", markup=False, highlight=False)
    table = rich.table.Table(box=rich.box.SIMPLE, pad_edge=False)
    for title in ("output column", "type", "from"):
        table.add_column(title, overflow="fold")
    for field in job.columns.output:
        origin = "input" if field.name in job.columns.carried.names else "job"
        table.add_row(rich.text.Text(field.name), rich.text.Text(str(field.type)), origin)
    console.print(table)
    for preview in validation.prompts:
        size = "" if preview.num_tokens is None else f": {preview.num_tokens:,} tokens"
        console.print(f"{preview.row}{size}", style="bold", markup=False, highlight=False)
        if preview.text:
            text = repr(preview.text[:_SHOWN_CHARS])
            console.print(f"  {text}", markup=False, highlight=False, soft_wrap=True)
    for warning in validation.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False, soft_wrap=True)


def _preview(row: Row, builder: PromptBuilder, job: PlannedJob) -> PromptPreview:
    try:
        row.check()
        prompt = builder.build(row.cells)
    except (RowFault, RowSkipped) as reason:
        return PromptPreview(row=row.place, text="", num_tokens=None, problem=str(reason))
    return PromptPreview(
        row=row.place,
        text=builder.text(prompt),
        num_tokens=len(prompt.whole_ids),
        problem=_problem(prompt, job),
    )


def _stretch(job: PlannedJob) -> tuple[str, ...]:
    """What it costs that sequences are longer than the model was made for."""
    model, engine = job.model_config, job.spec.engine
    before, after = model.own_longest or model.max_len, job.max_model_len
    if after <= before:
        return ()
    # Where neither is said it depends on the device.
    stored = engine.kv_dtype or engine.dtype or "bfloat16"
    token_bytes = kv_bytes_per_token(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        kv_dtype=stored,
    )
    pool = PoolCapacity(
        num_blocks=engine.num_blocks or 0,
        block_size=engine.block_size,
        bytes_per_token=token_bytes,
    )
    is_sized = engine.num_blocks is not None
    return (longer_sequences(before, after, pool=pool, is_sized=is_sized),)


def _problem(prompt: Prompt, job: PlannedJob) -> str | None:
    """Why the engine would refuse the prompt, as far as that is known without one, or what of it
    would be cut."""
    num_tokens, engine = len(prompt.ids), job.spec.engine
    room = job.max_model_len - num_tokens
    if room < 1:
        return (
            f"{num_tokens:,} tokens leave no room for a completion; engine.max_model_len is "
            f"{job.max_model_len:,}"
        )
    wanted = min(prompt.params.max_tokens or 1, room)
    # The last token needs no slot.
    needed = blocks_for(num_tokens + wanted - 1, engine.block_size)
    if engine.num_blocks is not None and needed > engine.num_blocks:
        return (
            f"{num_tokens:,} tokens and {wanted:,} new ones need {needed:,} blocks; "
            f"engine.num_blocks is {engine.num_blocks:,}"
        )
    if prompt.truncated:
        return (
            f"{prompt.truncated:,} of {len(prompt.whole_ids):,} tokens would be cut "
            f"({job.spec.input.on_too_long})"
        )
    return None


def look_at_output(job: PlannedJob) -> tuple[list[str], int]:
    """What a run would say of the output folder, and the exit code it would end with."""
    if job.refusal is not None:
        return [f"a run would be refused: {job.refusal}"], job.refusal.exit_code
    pending = output_view.pending_retry(job.store, job.history)
    if pending is not None:
        return [
            f"a run would be refused: revision {pending.number}, a retry, is not finished; "
            f"`jaxpaged retry {job.store.url}` finishes it"
        ], OutputConflictError.exit_code
    if job.is_finished:
        return [f"{job.store.url} already holds this job, finished: a run would do nothing"], 0
    return [], 0
