"""Finished rows as a table in the output's schema: their own cells, results, scores, addresses."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from jaxpaged.job import result_columns, scores, token_logprobs
from jaxpaged.job.columns import ColumnPlan
from jaxpaged.job.row_window import FinishedBatch, RowResult, SampleResult
from jaxpaged.job.sections import EvalSpec
from jaxpaged.job.token_logprobs import LOGPROBS_TYPE

_MAX_REPEATED_BYTES = 2**29


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """One row of the output.

    Attributes:
        result: What its row of the input came to.
        sample: The completion it shows, the first one of a list; None if there is none.
        number: Which of the row's completions that is.
    """

    result: RowResult
    sample: SampleResult | None
    number: int


def build(batches: Sequence[FinishedBatch], plan: ColumnPlan, scoring: EvalSpec | None) -> pa.Table:
    """The rows of the batches in the output's schema."""
    each = plan.rows_each
    lines = [
        _Line(
            result=result,
            sample=result.samples[number] if result.samples else None,
            number=number,
        )
        for finished in batches
        for result in finished.results
        for number in range(each)
    ]
    made = {"row": _repeated(_addresses(batches), each)}
    if scoring is not None:
        made |= _scores(batches, lines, scoring, each=each)
    arrays: list[pa.Array | pa.ChunkedArray] = []
    for field in plan.output:
        if field.name in plan.carried.names:
            chunks = [
                _typed(chunk, field.type)
                for f in batches
                for chunk in _repeated(f.batch.cells.column(field.name), each).chunks
            ]
            arrays.append(pa.chunked_array(chunks, field.type))
        elif field.name in made:
            arrays.append(made[field.name])
        elif field.name == "completions":
            arrays.append(_completions([line.result for line in lines], field.type))
        else:
            arrays.append(_array(_values(lines, field.name, plan), field.type))
    return pa.Table.from_arrays(arrays, schema=plan.output)


def _values(lines: Sequence[_Line], name: str, plan: ColumnPlan) -> list[Any]:
    """A column of results; in a row with a list of completions it is about all of them."""
    if name in _OF_SAMPLE:
        get, without = _OF_SAMPLE[name]
        return [without if line.sample is None else get(line.sample) for line in lines]
    if name == "sample":
        return [line.number for line in lines]
    if plan.form == "list" or name not in _OF_BOTH:
        return [getattr(line.result, name) for line in lines]
    return [getattr(line.result if line.sample is None else line.sample, name) for line in lines]


# Columns of one completion, with what is written where there is none.
_OF_SAMPLE: dict[str, tuple[Callable[[SampleResult], object], object]] = {
    "completion": (lambda sample: sample.text, None),
    "token_ids": (lambda sample: sample.token_ids, ()),
    "cumulative_logprob": (lambda sample: sample.cumulative_logprob, None),
    "score": (lambda sample: sample.score, None),
    "logprobs": (lambda sample: sample.logprobs, None),
}

# What there is to say of a completion as well as of a row.
_OF_BOTH = ("finish_reason", "stop_reason", "completion_tokens", "ends_in_partial_character")


def _completions(results: Sequence[RowResult], kind: pa.DataType) -> pa.Array:
    """Each row's completions as a list; null where there are none."""
    samples = [sample for result in results for sample in result.samples]
    fields = list(kind.value_type)
    arrays = [
        _array([getattr(sample, field.name) for sample in samples], field.type) for field in fields
    ]
    items = pa.StructArray.from_arrays(arrays, fields=fields)
    return token_logprobs.lists(items, [len(result.samples) or None for result in results])


def _addresses(batches: Sequence[FinishedBatch]) -> pa.StructArray:
    files: list[str] = []
    groups: list[int] = []
    indices: list[int] = []
    for batch in (finished.batch for finished in batches):
        files += [batch.file] * len(batch)
        groups += [batch.row_group] * len(batch)
        indices += range(batch.first_index, batch.first_index + len(batch))
    kind = result_columns.ROW_TYPE
    arrays = [
        pa.array(values, field.type)
        for values, field in zip((files, groups, indices), kind, strict=True)
    ]
    return pa.StructArray.from_arrays(arrays, fields=list(kind))


def _scores(
    batches: Sequence[FinishedBatch], lines: Sequence[_Line], scoring: EvalSpec, *, each: int
) -> dict[str, pa.Array]:
    """The score columns, of a list those of its first completion.

    A row that failed is wrong wherever it could be right; one that was skipped is not scored.
    """
    references = [
        reference
        for finished in batches
        for reference in finished.batch.values(scoring.reference)
        for _ in range(each)
    ]
    found: dict[str, pa.Array] = {}
    for metric in scoring.metrics:
        values = []
        for line, reference in zip(lines, references, strict=True):
            text = line.sample.text if line.sample is not None else ""
            text = scores.answer(text, scoring.answer_after)
            value = scores.score(metric, text, reference)
            is_skipped = line.result.skip_reason is not None
            values.append(None if is_skipped else value and line.sample is not None)
        found[result_columns.score_name(metric)] = pa.array(values, pa.bool_())
    return found


def _repeated(cells: pa.Array, times: int) -> pa.ChunkedArray:
    """Each cell so many times, in chunks of a size that Arrow can index."""
    if times == 1:
        return pa.chunked_array([cells], cells.type)
    bytes_each = max(1, cells.nbytes * times // max(1, len(cells)))
    size = max(1, _MAX_REPEATED_BYTES // bytes_each)
    pieces = [cells.slice(start, size) for start in range(0, len(cells), size)]
    return pa.chunked_array([_repeated_piece(piece, times) for piece in pieces], cells.type)


def _repeated_piece(cells: pa.Array, times: int) -> pa.Array:
    try:
        return cells.take(pa.array(np.repeat(np.arange(len(cells)), times)))
    except pa.ArrowNotImplementedError:
        # Of some types, such as lists of views, Arrow cannot pick single cells, but join them.
        return pa.concat_arrays(
            [cells.slice(i, 1) for i in range(len(cells)) for _ in range(times)]
        )


def _typed(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """The cells in the type they were declared with."""
    if array.type == kind:
        return array
    return (
        array.dictionary_encode().cast(kind) if pa.types.is_dictionary(kind) else array.cast(kind)
    )


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    if kind == LOGPROBS_TYPE:
        return token_logprobs.to_arrow(values)
    try:
        return pa.array(values, kind)
    except UnicodeEncodeError:
        # Half of a surrogate pair cannot be stored; "?" stands for it.
        valid = [
            value.encode(errors="replace").decode() if isinstance(value, str) else value
            for value in values
        ]
        return pa.array(valid, kind)
