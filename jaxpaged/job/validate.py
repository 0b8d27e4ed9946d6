"""A look at a job without running it: its columns and its first prompts as the model sees them.

Loads the tokenizer, neither weights nor JAX.
"""

import dataclasses

import rich.box
import rich.console
import rich.table
import rich.text

from jaxpaged.config import DEFAULT_MAX_MODEL_LEN
from jaxpaged.errors import JaxPagedError
from jaxpaged.job import output_folder, planned_job, reader
from jaxpaged.job.planned_job import PlannedJob
from jaxpaged.job.prompts import PromptBuilder
from jaxpaged.job.row_batch import Row
from jaxpaged.job.row_fault import RowFault
from jaxpaged.job.spec import JobSpec
from jaxpaged.job.units import Unit
from jaxpaged.model.checkpoint import Checkpoint, open_checkpoint
from jaxpaged.model.source import locate

_SHOWN_CHARS = 2000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PromptPreview:
    """One of the first prompts.

    Attributes:
        row: The row's address, for people.
        text: What is tokenized; empty for a row at fault.
        num_tokens: Its tokens; None for a row at fault.
        problem: What is wrong; None if nothing is.
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
        max_model_len: Most tokens of prompt and completion together.
        warnings: What would keep the job from running as it is.
    """

    job: PlannedJob
    prompts: tuple[PromptPreview, ...]
    max_model_len: int
    warnings: tuple[str, ...]


def validate(spec: JobSpec, num_rows: int) -> Validation:
    """Checks a job and makes the prompts of its first rows.

    Raises:
        ConfigError: The job, or the model's files, are not right.
        InputSchemaError: The input is missing, broken, or not what the job needs.
    """
    job = planned_job.plan(spec)
    checkpoint = open_checkpoint(locate(spec.model))
    builder = PromptBuilder(spec, checkpoint.tokenizer(), job.inputs.schema.names)
    max_model_len = _max_model_len(spec, checkpoint)
    previews: list[PromptPreview] = []
    first = Unit(index=0, start=0, stop=min(num_rows, job.inputs.num_rows))
    for batch in reader.read(job.inputs, job.columns.needed, [first]):
        rows = batch.rows(builder.columns)
        previews += [_preview(row, builder, max_model_len) for row in rows]
    return Validation(
        job=job,
        prompts=tuple(previews),
        max_model_len=max_model_len,
        warnings=_warnings(job, previews),
    )


def show(validation: Validation, console: rich.console.Console) -> None:
    """Prints what was found."""
    job = validation.job
    console.print(
        f"files: {len(job.inputs.files):,}, rows: {job.inputs.num_rows:,}, "
        f"parts: {len(job.units):,}",
        highlight=False,
    )
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


def _max_model_len(spec: JobSpec, checkpoint: Checkpoint) -> int:
    limit = checkpoint.config.max_position_embeddings
    return spec.engine.max_model_len or min(limit, DEFAULT_MAX_MODEL_LEN)


def _preview(row: Row, builder: PromptBuilder, max_model_len: int) -> PromptPreview:
    try:
        row.check()
        prompt = builder.build(row.cells)
    except RowFault as fault:
        return PromptPreview(row=row.place, text="", num_tokens=None, problem=str(fault))
    problem = None
    if len(prompt.ids) >= max_model_len:
        problem = (
            f"{len(prompt.ids):,} tokens leave no room for a completion; engine.max_model_len is "
            f"{max_model_len:,}"
        )
    return PromptPreview(
        row=row.place, text=builder.text(prompt), num_tokens=len(prompt.ids), problem=problem
    )


def _warnings(job: PlannedJob, previews: list[PromptPreview]) -> tuple[str, ...]:
    found = [f"{preview.row}: {preview.problem}" for preview in previews if preview.problem]
    try:
        if output_folder.is_finished(job.output, job.record, job.units):
            found.append(f"{job.output} already holds this job, finished: a run would do nothing")
    except JaxPagedError as error:
        found.append(f"a run would be refused: {error}")
    return tuple(found)
