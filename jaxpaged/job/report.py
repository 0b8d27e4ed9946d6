"""The report of a run: what a job gave, how fast, with what; as a value and as JSON.

Holds addresses of rows and never their text, but for the samples, which stay out of the JSON.
`docs/report.md` tells what the JSON has.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pydantic

from jaxpaged.cache.capacity import blocks_for
from jaxpaged.job.feeder import Sample
from jaxpaged.job.slow_rows import SlowRow
from jaxpaged.job.spec import JobSpec
from jaxpaged.job.tally import AdapterCount, ErrorCount, MetricScore
from jaxpaged.job.timeline import Timeline

REPORT_VERSION = 3

JobState = Literal[
    "finished",
    "already finished",
    "retry unfinished",
    "stopped",
    "too many row errors",
    "failed",
    "killed",
    "unfinished",
]
"""How a job stands. The last two are never told by a run itself: "killed", its last run ended
without a word; "unfinished", no run says why parts are missing."""

_HIGH_TRUNCATED_SHARE = 0.2
_HIGH_ERROR_SHARE = 0.05
_NOT_IN_JSON = ("samples", "has_page")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OutputFacts:
    """All rows in the output folder.

    A row is one of the input, also where each of its completions is a row of the output.

    Attributes:
        path: The folder.
        parts: Finished parts.
        rows: Rows in them.
        finish_reasons: Rows by finish reason; "length" if any of a row's completions ended so.
        prompt_tokens: Their prompts' tokens.
        completion_tokens: Their completions' tokens.
        cached_tokens: Prompt tokens that came from the prefix cache.
        partial_characters: Rows with a completion that was cut inside a character.
        truncated_prompts: Rows whose prompts were cut, as `input.on_too_long` says.
        truncated_tokens: Tokens that were cut out of them.
        prompt_lengths: Prompts by range of length; a range goes by its first length, see `lengths`.
        completion_lengths: The same for what rows that neither failed nor were skipped came to.
        adapters: The rows by the adapter that completed them; empty in a job without any.
    """

    path: str
    parts: int
    rows: int
    finish_reasons: dict[str, int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    partial_characters: int
    truncated_prompts: int = 0
    truncated_tokens: int = 0
    prompt_lengths: dict[int, int] = dataclasses.field(default_factory=dict)
    completion_lengths: dict[int, int] = dataclasses.field(default_factory=dict)
    adapters: dict[str, AdapterCount] = dataclasses.field(default_factory=dict)

    @property
    def num_skipped(self) -> int:
        """Rows that were passed over."""
        return self.finish_reasons.get("skipped", 0)

    @property
    def cached_share(self) -> float:
        """The share of the prompts' tokens that came from the prefix cache."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def truncated_share(self) -> float:
        """The share of rows that ended at a limit."""
        return self._share("length")

    @property
    def error_share(self) -> float:
        """The share of rows that failed."""
        return self._share("error")

    def _share(self, finish_reason: str) -> float:
        return self.finish_reasons.get(finish_reason, 0) / self.rows if self.rows else 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What the last run did.

    Attributes:
        attempt: Its number.
        revision: The revision of the output that it worked on.
        parts_kept: Parts that earlier runs had committed.
        parts_adopted: Whole parts of earlier runs that it committed for them.
        parts_discarded: Parts of earlier runs that it completed again.
        rows: Rows it completed, those of parts that it did not finish included.
        rows_resumed: Rows that it took from the journal of earlier runs.
        row_errors: Failed rows among both.
        rows_skipped: Rows among both that were passed over.
        rows_with_special_text: Those whose text reads like a special token.
        rows_ending_in_answer: Chats that end in a message of the assistant, which was taken as
            finished.
        load_seconds: Until the engine was ready.
        seconds: From the first row to the last.
        pool: The engine's own description of its pool.
        peak_memory_bytes: Most memory the process has had resident; 0 if no engine was loaded.
        engine: The engine's counters.
        slow_rows: The rows that took longest, the slowest first.
        timeline: What the engine did over time.
    """

    attempt: int = 0
    revision: int = 0
    parts_kept: int = 0
    parts_adopted: int = 0
    parts_discarded: int = 0
    rows: int = 0
    rows_resumed: int = 0
    row_errors: int = 0
    rows_skipped: int = 0
    rows_with_special_text: int = 0
    rows_ending_in_answer: int = 0
    load_seconds: float = 0.0
    seconds: float = 0.0
    pool: str = ""
    peak_memory_bytes: int = 0
    engine: dict[str, Any] = dataclasses.field(default_factory=dict)
    slow_rows: tuple[SlowRow, ...] = ()
    timeline: Timeline = dataclasses.field(default_factory=Timeline)

    def tokens_per_second(self, phase: Literal["prefill", "decode"]) -> float | None:
        """Tokens over the device time of steps of this phase; None if there were none."""
        seconds = self.engine.get(f"{phase}_seconds", 0.0)
        return self.engine[f"{phase}_tokens"] / seconds if seconds else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class IdentityFacts:
    """Which job it is.

    Attributes:
        fingerprint: Of all that its rows depend on, revisions included.
        created: When it began.
        revisions: How often it was extended or retried.
        model: Fingerprints of the model's parts.
        input_files: How many input files it has.
        input_bytes: Their size.
    """

    fingerprint: str
    created: str
    revisions: int
    model: dict[str, str]
    input_files: int
    input_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobReport:
    """What a job gave.

    Attributes:
        state: How the run ended.
        input_rows: Rows of the input.
        output: All rows in finished parts, of this run and earlier ones.
        errors: The failed rows among them, by code.
        scores: Their scores.
        run: What this run did.
        warnings: What a user should look at.
        job: The job's keys.
        versions: Of what the result depends on.
        notes: What a user may want to know.
        message: What ended the run, if it did not finish.
        identity: Which job it is; None in reports of before there was such an entry.
        written: When the report was written; empty in those.
        samples: Some completions of this run, for people; not in the JSON.
        has_page: Whether the report lies in the folder as a page, too; not in the JSON.
        report_version: Of the JSON's shape.
    """

    state: JobState
    input_rows: int
    output: OutputFacts
    errors: tuple[ErrorCount, ...]
    scores: tuple[MetricScore, ...]
    run: RunFacts
    warnings: tuple[str, ...]
    job: dict[str, Any]
    versions: dict[str, str]
    notes: tuple[str, ...] = ()
    message: str = ""
    identity: IdentityFacts | None = None
    written: str = ""
    samples: tuple[Sample, ...] = ()
    has_page: bool = False
    report_version: int = REPORT_VERSION

    @property
    def num_errors(self) -> int:
        """Rows that failed."""
        return sum(error.count for error in self.errors)

    def to_json(self) -> dict[str, Any]:
        """The report in JSON's types, without row text."""
        values = dataclasses.asdict(self)
        for name in _NOT_IN_JSON:
            del values[name]
        for score, metric in zip(self.scores, values["scores"], strict=True):
            metric["overall"]["mean"] = score.overall.mean
            for group, count in score.by.items():
                metric["by"][group]["mean"] = count.mean
        return _finite(values)


def from_json(values: object) -> JobReport | None:
    """The report that `to_json` gave; None for anything else."""
    try:
        return pydantic.TypeAdapter(JobReport).validate_python(values)
    except pydantic.ValidationError:
        return None


def warnings(
    output: OutputFacts,
    run: RunFacts,
    spec: JobSpec,
    *,
    input_rows: int,
    scores: tuple[MetricScore, ...],
) -> tuple[str, ...]:
    """What a user should look at."""
    found = []
    if input_rows == 0:
        found.append("the input has no rows")
    if output.error_share >= _HIGH_ERROR_SHARE:
        found.append(
            f"{output.error_share:.0%} of the rows failed; see their error_code and error_message"
        )
    for score in scores:
        missing = output.rows - output.num_skipped - score.overall.scored
        if missing:
            found.append(
                f"{missing:,} of {output.rows:,} rows have no {score.metric} score: their "
                f"reference ({spec.eval.reference if spec.eval else ''}) cannot be compared with"
            )
    if run.parts_discarded:
        found.append(
            f"{run.parts_discarded:,} parts of earlier runs were not whole and are replaced"
        )
    if output.truncated_share >= _HIGH_TRUNCATED_SHARE:
        remedy = "raise sampling.max_tokens or engine.max_model_len"
        if spec.sampling.max_tokens is None:
            remedy = "sampling.max_tokens is not set, so that engine.max_model_len is the limit"
        found.append(f"{output.truncated_share:.0%} of the rows were cut off at a limit; {remedy}")
    if run.rows_with_special_text:
        treatment = "tokens" if spec.input.allow_special_tokens else "text"
        found.append(
            f"{run.rows_with_special_text:,} rows hold text that reads like a special token; it "
            f"was taken as {treatment} (input.allow_special_tokens)"
        )
    stretch = _stretch(run.engine)
    if stretch is not None:
        found.append(stretch)
    if run.rows_ending_in_answer:
        found.append(
            f"{run.rows_ending_in_answer:,} chats end in a message of the assistant; it was taken "
            "as finished, and another one follows (input.continue_final_message: true continues it)"
        )
    return tuple(found)


def _stretch(engine: Mapping[str, Any]) -> str | None:
    """What it costs that sequences are longer than the model was made for, if they are."""
    before, after = engine.get("model_max_len"), engine.get("max_model_len")
    if before is None or after is None or after <= before:
        return None
    needed = [blocks_for(tokens, engine["block_size"]) for tokens in (before, after)]
    fit = [engine["num_blocks"] // blocks for blocks in needed]
    return (
        f"engine.rope: sequences of {after:,} tokens in a model made for {before:,}; a sequence "
        f"takes up to {needed[1]:,} blocks instead of {needed[0]:,}, and {fit[1]:,} of them fit "
        f"the pool at once instead of {fit[0]:,}"
    )


def notes(output: OutputFacts, *, unused_columns: Sequence[str]) -> tuple[str, ...]:
    """What a user may want to know.

    Args:
        output: The rows.
        unused_columns: Input columns that are carried along and that nothing of the job reads.
    """
    found = []
    if unused_columns:
        found.append(
            "input columns that are carried along, and used by neither prompts, parameters nor "
            f"scores: {', '.join(unused_columns)}"
        )
    if output.truncated_prompts:
        found.append(
            f"{output.truncated_prompts:,} prompts were cut, by {output.truncated_tokens:,} tokens "
            "(input.on_too_long)"
        )
    if output.partial_characters:
        found.append(
            f"{output.partial_characters:,} rows have a completion that was cut inside a character"
        )
    return tuple(found)


def _finite(value: Any) -> Any:  # noqa: ANN401  (any JSON value)
    """The same nested value with null for numbers that JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return value
