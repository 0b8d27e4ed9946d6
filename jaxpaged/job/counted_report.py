"""The report of a job as its output folder stands: what commit records come to, beside what a run
says of itself.

Whoever asks: a run at its end, or someone who looks at the folder later. Reads no part.
"""

import dataclasses

from jaxpaged.job import report, result_columns, versions
from jaxpaged.job.feeder import Sample
from jaxpaged.job.output import history, output_view
from jaxpaged.job.output.history import History
from jaxpaged.job.prompt import prompts
from jaxpaged.job.report import IdentityFacts, JobReport, JobState, OutputFacts, RunFacts
from jaxpaged.job.spec import JobSpec
from jaxpaged.job.tally import Tally
from jaxpaged.job.units import Units
from jaxpaged.storage.store import Store


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobFolder:
    """An output folder and whose it is.

    Attributes:
        store: Where it lies.
        history: What it remembers.
        units: How the job's rows are cut into parts.
        spec: The job.
    """

    store: Store
    history: History
    units: Units
    spec: JobSpec


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """How a run ended, and what it alone knows.

    Attributes:
        state: How it ended.
        message: What ended it, if it did not finish.
        facts: What it did.
        samples: Some of its completions.
        versions: What it ran with; None for what is installed here.
    """

    state: JobState
    message: str = ""
    facts: RunFacts = dataclasses.field(default_factory=RunFacts)
    samples: tuple[Sample, ...] = ()
    versions: dict[str, str] | None = None


def make(folder: JobFolder, run: RunEnd) -> JobReport:
    """The report.

    Raises:
        OutputConflictError: A record cannot be read.
        StorageError: The folder cannot be read.
    """
    spec, num_rows = folder.spec, folder.units.num_rows
    tally = Tally(spec.eval, adapters=spec.adapter_choice())
    records = output_view.current_records(folder.store, range(len(folder.units)))
    for record in records:
        tally.add_counts(record.counts)
    scores = tally.scores()
    output = OutputFacts(
        path=folder.store.url,
        parts=len(records),
        rows=tally.num_rows,
        finish_reasons=dict(tally.finish_reasons),
        prompt_tokens=tally.tokens["prompt"],
        completion_tokens=tally.tokens["completion"],
        cached_tokens=tally.tokens["cached"],
        partial_characters=tally.num_partial_characters,
        truncated_prompts=tally.num_truncated_prompts,
        truncated_tokens=tally.num_truncated_tokens,
        prompt_lengths=dict(sorted(tally.prompt_lengths.items())),
        completion_lengths=dict(sorted(tally.completion_lengths.items())),
        adapters=dict(sorted(tally.adapters.items())),
    )
    return JobReport(
        state=run.state,
        input_rows=num_rows,
        output=output,
        errors=tally.errors(),
        scores=scores,
        run=run.facts,
        warnings=report.warnings(output, run.facts, spec, input_rows=num_rows, scores=scores),
        # The model by the commit that the job began with, where its name can move.
        job={**spec.model_dump(mode="json"), "model": folder.history.job.result_keys["model"]},
        versions=run.versions or versions.installed(),
        notes=report.notes(output, unused_columns=_unused_columns(folder)),
        message=run.message,
        identity=_identity(folder.history),
        written=history.now(),
        samples=run.samples,
    )


def _identity(known: History) -> IdentityFacts:
    return IdentityFacts(
        fingerprint=known.fingerprint,
        created=known.job.created,
        revisions=len(known.revisions),
        model=known.job.model,
        input_files=len(known.files),
        input_bytes=sum(file.bytes for file in known.files),
    )


def _unused_columns(folder: JobFolder) -> list[str]:
    """The carried columns that nothing of the job reads."""
    spec = folder.spec
    written = {field.name for field in result_columns.fields(spec)}
    carried = [name for name, _ in folder.history.job.schema if name not in written]
    used = {
        *prompts.used_columns(spec.input, carried),
        *prompts.param_columns(spec.sampling.columns).values(),
        *((spec.eval.reference, spec.eval.by) if spec.eval else ()),
        spec.adapter_column,
    }
    return [name for name in carried if name not in used]
