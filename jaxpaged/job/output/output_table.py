"""Finished rows as a table in the output's schema: their own cells, results, scores, addresses."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from jaxpaged.job import columns, scores
from jaxpaged.job.columns import ColumnPlan
from jaxpaged.job.row_window import FinishedBatch, RowResult
from jaxpaged.job.sections import EvalSpec


def build(batches: Sequence[FinishedBatch], plan: ColumnPlan, scoring: EvalSpec | None) -> pa.Table:
    """The rows of the batches in the output's schema."""
    results = [result for finished in batches for result in finished.results]
    made: dict[str, pa.Array] = {"row": _addresses(batches)}
    if scoring is not None:
        made |= _scores(batches, results, scoring)
    arrays: list[pa.Array | pa.ChunkedArray] = []
    for field in plan.output:
        if field.name in plan.carried.names:
            chunks = [_typed(f.batch.cells.column(field.name), field.type) for f in batches]
            arrays.append(pa.chunked_array(chunks, field.type))
        elif field.name in made:
            arrays.append(made[field.name])
        else:
            arrays.append(_array([getattr(result, field.name) for result in results], field.type))
    return pa.Table.from_arrays(arrays, schema=plan.output)


def _addresses(batches: Sequence[FinishedBatch]) -> pa.StructArray:
    files: list[str] = []
    groups: list[int] = []
    indices: list[int] = []
    for batch in (finished.batch for finished in batches):
        files += [batch.file] * len(batch)
        groups += [batch.row_group] * len(batch)
        indices += range(batch.first_index, batch.first_index + len(batch))
    kind = columns.ROW_TYPE
    arrays = [
        pa.array(values, field.type)
        for values, field in zip((files, groups, indices), kind, strict=True)
    ]
    return pa.StructArray.from_arrays(arrays, fields=list(kind))


def _scores(
    batches: Sequence[FinishedBatch], results: Sequence[RowResult], scoring: EvalSpec
) -> dict[str, pa.Array]:
    """The score columns; a row without a completion is wrong wherever it could be right."""
    references = [
        reference for finished in batches for reference in finished.batch.values(scoring.reference)
    ]
    found: dict[str, pa.Array] = {}
    for metric in scoring.metrics:
        values = []
        for result, reference in zip(results, references, strict=True):
            value = scores.score(metric, result.completion or "", reference)
            values.append(value and result.completion is not None)
        found[columns.score_name(metric)] = pa.array(values, pa.bool_())
    return found


def _typed(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """The cells in the type they were declared with."""
    if array.type == kind:
        return array
    return (
        array.dictionary_encode().cast(kind) if pa.types.is_dictionary(kind) else array.cast(kind)
    )


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    try:
        return pa.array(values, kind)
    except UnicodeEncodeError:
        # Half of a surrogate pair cannot be stored; "?" stands for it.
        valid = [
            value.encode(errors="replace").decode() if isinstance(value, str) else value
            for value in values
        ]
        return pa.array(valid, kind)
