"""The columns that a job writes behind the ones it carries.

Knows names and types, neither the input nor rows.
"""

from typing import Literal

import pyarrow as pa

from jaxpaged.job.spec import JobSpec
from jaxpaged.job.token_logprobs import LOGPROBS_TYPE

ROW_TYPE = pa.struct([("file", pa.string()), ("row_group", pa.int32()), ("index", pa.int64())])
"""The type of a row's address."""

Form = Literal["single", "list", "exploded"]
"""How the completions of a row are written: it has one; it has several, as a list in one row
(`completions`); or each is a row of the output (`sample` tells which)."""

RESULT_FIELDS = (
    pa.field("completion", pa.large_string()),
    pa.field("finish_reason", pa.string()),
    pa.field("stop_reason", pa.string()),
    pa.field("prompt_tokens", pa.int32()),
    pa.field("completion_tokens", pa.int32()),
    pa.field("cached_tokens", pa.int32()),
    pa.field("error_code", pa.string()),
    pa.field("error_message", pa.string()),
    pa.field("row", ROW_TYPE),
    pa.field("seed", pa.int64()),
    pa.field("prompt_sha256", pa.string()),
    pa.field("ends_in_partial_character", pa.bool_()),
)
"""The columns every job writes behind the carried ones; instead of `completion`, one with several
completions in a row writes `completions`, and the others are about all of them."""

TRUNCATED = "truncated_tokens"
"""The column that says how many tokens were cut out of a prompt, where prompts are cut."""

_TOKEN_IDS = pa.field("token_ids", pa.list_(pa.int32()))
_CUMULATIVE = pa.field("cumulative_logprob", pa.float64())


def score_name(metric: str) -> str:
    """The column of a metric's scores."""
    return f"score_{metric}"


def fields(spec: JobSpec) -> list[pa.Field]:
    """The columns that a job writes behind the carried ones."""
    how, found = form(spec), list(RESULT_FIELDS)
    if how == "list":
        kind = pa.list_(pa.struct(_sample_fields(spec)))
        found = [pa.field("completions", kind) if f.name == "completion" else f for f in found]
    if how == "exploded":
        found.append(pa.field("sample", pa.int32()))
    if spec.eval is not None:
        found += [pa.field(score_name(metric), pa.bool_()) for metric in spec.eval.metrics]
    if spec.output.token_ids and how != "list":
        found.append(_TOKEN_IDS)
    if spec.output.prompt:
        found.append(pa.field("prompt", pa.large_string()))
    if how != "list":
        found += _logprob_fields(spec)
    if spec.sampling.prompt_logprobs is not None:
        found.append(pa.field("prompt_logprobs", LOGPROBS_TYPE))
    if spec.input.on_too_long.startswith("truncate"):
        found.append(pa.field(TRUNCATED, pa.int32()))
    return found


def form(spec: JobSpec) -> Form:
    """How a job writes the completions of a row."""
    if spec.output.explode:
        return "exploded"
    return "single" if spec.sampling.n == 1 else "list"


def rows_each(spec: JobSpec) -> int:
    """Rows of the output for each row of the input."""
    return spec.sampling.n if spec.output.explode else 1


def _sample_fields(spec: JobSpec) -> list[pa.Field]:
    """What is written of a completion that is one of a list."""
    fields = [
        pa.field("text", pa.large_string()),
        pa.field("finish_reason", pa.string()),
        pa.field("stop_reason", pa.string()),
        pa.field("completion_tokens", pa.int32()),
        _CUMULATIVE,
        pa.field("ends_in_partial_character", pa.bool_()),
    ]
    fields += [field for field in _logprob_fields(spec) if field is not _CUMULATIVE]
    return [*fields, _TOKEN_IDS] if spec.output.token_ids else fields


def _logprob_fields(spec: JobSpec) -> list[pa.Field]:
    """What is written of how likely a completion is."""
    sampling, fields = spec.sampling, []
    if not (sampling.logprobs is sampling.best_of is sampling.beam_width is None):
        fields.append(_CUMULATIVE)
    if sampling.beam_width is not None:
        fields.append(pa.field("score", pa.float64()))
    if sampling.logprobs is not None:
        fields.append(pa.field("logprobs", LOGPROBS_TYPE))
    return fields
