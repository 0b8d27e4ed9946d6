"""Counts over written rows: errors, tokens, how completions ended, scores.

Everything is counted from the rows as they stand in the output, so that a run that finds finished
parts counts them like its own. Where each row of the input gave several rows, these are counted as
one, as if they were one with a list of completions.
"""

import collections
import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from jaxpaged.job import lengths, result_columns, row_window
from jaxpaged.job.adapter_choice import AdapterChoice
from jaxpaged.job.sections import EvalSpec

MAX_GROUPS = 100
OTHER_GROUPS = "(other)"
NULL_GROUP = "(null)"

_MAX_EXAMPLES = 3
_WITHOUT_COMPLETION = ("error", "skipped")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowError:
    """One failed row, by its address."""

    file: str
    row_group: int
    index: int
    message: str | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ErrorCount:
    """How many rows failed with a code, and the first of them."""

    code: str
    count: int
    examples: tuple[RowError, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScoreCount:
    """How many scored rows are right; `mean` is None if none was scored."""

    correct: int
    scored: int

    @property
    def mean(self) -> float | None:
        """The share of right rows."""
        return self.correct / self.scored if self.scored else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MetricScore:
    """A metric's result.

    Attributes:
        metric: Its name.
        overall: Over all rows that could be scored, by their first completion; a failed row
            counts as wrong, a skipped one does not count.
        by: The same for each value of the grouping column; empty without one.
    """

    metric: str
    overall: ScoreCount
    by: dict[str, ScoreCount]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupScore:
    """A metric's count for one value of the grouping column; None for all rows."""

    metric: str
    group: str | None
    correct: int
    scored: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdapterCount:
    """What the rows of one adapter come to, or those of the model as it is.

    Attributes:
        rows: Rows, failed and skipped ones included.
        prompt_tokens: Their prompts' tokens.
        completion_tokens: Their completions' tokens.
    """

    rows: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def __add__(self, other: "AdapterCount") -> "AdapterCount":
        return AdapterCount(
            rows=self.rows + other.rows,
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            completion_tokens=self.completion_tokens + other.completion_tokens,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What some rows come to, as a value: the content of a `Tally`.

    Attributes:
        rows: Rows.
        finish_reasons: Rows by finish reason.
        tokens: Sums of prompt, completion and cached tokens.
        partial_characters: Rows with a completion that was cut inside a character.
        errors: Failed rows by code.
        examples: The first failed rows by code.
        scores: By metric and group.
        truncated_prompts: Rows whose prompts were cut.
        truncated_tokens: Tokens that were cut out of them.
        prompt_lengths: Prompts by range of length; see `lengths`. Empty in records of before there
            was such a count.
        completion_lengths: The same for what rows that neither failed nor were skipped came to.
        adapters: Rows by the adapter that completed them, where the job has any.
    """

    rows: int
    finish_reasons: dict[str, int]
    tokens: dict[str, int]
    partial_characters: int
    errors: dict[str, int]
    examples: dict[str, tuple[RowError, ...]]
    scores: tuple[GroupScore, ...]
    truncated_prompts: int = 0
    truncated_tokens: int = 0
    prompt_lengths: dict[int, int] = dataclasses.field(default_factory=dict)
    completion_lengths: dict[int, int] = dataclasses.field(default_factory=dict)
    adapters: dict[str, AdapterCount] = dataclasses.field(default_factory=dict)


class Tally:
    """Running counts.

    Args:
        scoring: What was scored; None for nothing.
        rows_each: Consecutive rows of the output for each row of the input.
        adapters: How rows choose an adapter; None where there are none, or they are not counted.

    Attributes:
        num_rows: Rows of the input.
        finish_reasons: Rows by finish reason.
        tokens: Sums of prompt, completion and cached tokens.
        num_partial_characters: Rows with a completion that was cut inside a character.
        num_truncated_prompts: Rows whose prompts were cut.
        num_truncated_tokens: Tokens that were cut out of them.
        prompt_lengths: Prompts by range of length; see `lengths`.
        completion_lengths: The same for what rows that neither failed nor were skipped came to.
        adapters: Rows by the adapter that completed them.
    """

    def __init__(
        self,
        scoring: EvalSpec | None,
        rows_each: int = 1,
        *,
        adapters: AdapterChoice | None = None,
    ) -> None:
        self._rows_each = rows_each
        self._choice = adapters
        # What a table ended with that is not a whole row of the input.
        self._rest: pa.Table | None = None
        self._by = scoring.by if scoring else None
        self._metrics = scoring.metrics if scoring else ()
        self._error_counts: collections.Counter[str] = collections.Counter()
        self._examples: dict[str, list[RowError]] = collections.defaultdict(list)
        self._scores: dict[tuple[str, str | None], collections.Counter[bool]] = {}
        self._groups: set[str] = set()
        self.num_rows = 0
        self.finish_reasons: collections.Counter[str] = collections.Counter()
        self.tokens: collections.Counter[str] = collections.Counter()
        self.num_partial_characters = 0
        self.num_truncated_prompts = 0
        self.num_truncated_tokens = 0
        self.prompt_lengths: collections.Counter[int] = collections.Counter()
        self.completion_lengths: collections.Counter[int] = collections.Counter()
        self.adapters: dict[str, AdapterCount] = {}

    @property
    def num_errors(self) -> int:
        """Rows that failed."""
        return self._error_counts.total()

    def add_part(self, part: pathlib.Path | BinaryIO) -> None:
        """Counts the rows of a part that reads.

        Raises:
            OSError: It cannot be read, or is no part.
        """
        with pq.ParquetFile(part, pre_buffer=False) as file:
            for batch in file.iter_batches(columns=self.columns_of(file.schema_arrow)):
                self.add(pa.Table.from_batches([batch]))

    def columns_of(self, schema: pa.Schema) -> list[str]:
        """The columns of an output that are counted."""
        names = [
            *("finish_reason", "error_code", "error_message", "row"),
            *("prompt_tokens", "completion_tokens", "cached_tokens"),
            "ends_in_partial_character",
            *(result_columns.score_name(metric) for metric in self._metrics),
            *((self._by,) if self._by else ()),
            *((self._choice.column,) if self._choice and self._choice.column else ()),
        ]
        return (
            [*names, result_columns.TRUNCATED]
            if result_columns.TRUNCATED in schema.names
            else names
        )

    def add_counts(self, counts: Counts) -> None:
        """Counts what was counted before."""
        self.num_rows += counts.rows
        self.finish_reasons.update(counts.finish_reasons)
        self.tokens.update(counts.tokens)
        self.num_partial_characters += counts.partial_characters
        self.num_truncated_prompts += counts.truncated_prompts
        self.num_truncated_tokens += counts.truncated_tokens
        self.prompt_lengths.update(counts.prompt_lengths)
        self.completion_lengths.update(counts.completion_lengths)
        for name, count in counts.adapters.items():
            self._add_adapter(name, count)
        self._error_counts.update(counts.errors)
        for code, rows in counts.examples.items():
            known = self._examples[code]
            known += rows[: _MAX_EXAMPLES - len(known)]
        for score in counts.scores:
            group = None if score.group is None else self._known_group(score.group)
            count = self._scores.setdefault((score.metric, group), collections.Counter())
            count.update({True: score.correct, False: score.scored - score.correct})

    def counts(self) -> Counts:
        """All that was counted, as a value."""
        return Counts(
            rows=self.num_rows,
            finish_reasons=dict(self.finish_reasons),
            tokens=dict(self.tokens),
            partial_characters=self.num_partial_characters,
            errors=dict(self._error_counts),
            examples={code: tuple(rows) for code, rows in self._examples.items()},
            scores=tuple(
                GroupScore(metric=metric, group=group, correct=count[True], scored=count.total())
                for (metric, group), count in self._scores.items()
            ),
            truncated_prompts=self.num_truncated_prompts,
            truncated_tokens=self.num_truncated_tokens,
            prompt_lengths=dict(self.prompt_lengths),
            completion_lengths=dict(self.completion_lengths),
            adapters=dict(self.adapters),
        )

    def add(self, table: pa.Table) -> None:
        """Counts the rows of a table that has at least the columns that are counted."""
        if self._rows_each > 1:
            table = self._with_rest(table)
        self.num_rows += table.num_rows // self._rows_each
        grouped = self._grouped(table["finish_reason"])
        reasons = list(map(row_window.row_finish_reason, grouped))
        self.finish_reasons.update(reasons)
        self._add_lengths(table, reasons)
        self.tokens["prompt"] += _sum(self._firsts(table["prompt_tokens"]))
        self.tokens["completion"] += _sum(table["completion_tokens"])
        self.tokens["cached"] += _sum(self._firsts(table["cached_tokens"]))
        cuts = self._grouped(table["ends_in_partial_character"])
        self.num_partial_characters += sum(map(any, cuts))
        if result_columns.TRUNCATED in table.column_names:
            counts = self._firsts(table[result_columns.TRUNCATED]).to_pylist()
            self.num_truncated_prompts += sum(map(bool, counts))
            self.num_truncated_tokens += sum(count or 0 for count in counts)
        self._add_errors(table)
        if self._choice is not None:
            self._add_adapters(table, self._choice)
        if self._metrics:
            self._add_scores(table)

    def errors(self) -> tuple[ErrorCount, ...]:
        """The errors, the most frequent first."""
        return tuple(
            ErrorCount(code=code, count=count, examples=tuple(self._examples[code]))
            for code, count in self._error_counts.most_common()
        )

    def examples(self) -> list[str]:
        """Some failed rows, as address and code."""
        return [
            f"{row.file}, row group {row.row_group}, row {row.index}: {code}"
            for code, rows in self._examples.items()
            for row in rows
        ][:_MAX_EXAMPLES]

    def scores(self) -> tuple[MetricScore, ...]:
        """The scores, in the order of the job file."""
        return tuple(
            MetricScore(
                metric=metric,
                overall=self._score(metric, None),
                by={group: self._score(metric, group) for group in sorted(self._groups)},
            )
            for metric in self._metrics
        )

    def _score(self, metric: str, group: str | None) -> ScoreCount:
        counter = self._scores.get((metric, group), collections.Counter())
        return ScoreCount(correct=counter[True], scored=counter.total())

    def _with_rest(self, table: pa.Table) -> pa.Table:
        """The table from the first row of the input that was not counted to the last whole one."""
        if self._rest is not None:
            table = pa.concat_tables([self._rest, table])
        whole = table.num_rows - table.num_rows % self._rows_each
        self._rest = table.slice(whole) if whole < table.num_rows else None
        return table.slice(0, whole)

    def _firsts(self, values: pa.ChunkedArray) -> pa.ChunkedArray:
        """Of each row of the input the first value."""
        if self._rows_each == 1:
            return values
        return values.take(pa.array(range(0, len(values), self._rows_each), pa.int64()))

    def _grouped(self, values: pa.ChunkedArray) -> list[list[Any]]:
        """The values of each row of the input."""
        items, each = values.to_pylist(), self._rows_each
        return [items[start : start + each] for start in range(0, len(items), each)]

    def _add_lengths(self, table: pa.Table, reasons: Sequence[str | None]) -> None:
        prompts = self._firsts(table["prompt_tokens"]).drop_null()
        self.prompt_lengths.update(lengths.count(prompts.to_numpy()))
        completions = table["completion_tokens"].fill_null(0).to_numpy()
        is_completed = np.array([reason not in _WITHOUT_COMPLETION for reason in reasons], bool)
        completions = completions.reshape(-1, self._rows_each).sum(axis=1)[is_completed]
        self.completion_lengths.update(lengths.count(completions))

    def _add_adapters(self, table: pa.Table, choice: AdapterChoice) -> None:
        each = self._rows_each
        prompts = self._firsts(table["prompt_tokens"]).to_pylist()
        completions = self._grouped(table["completion_tokens"])
        cells: list[object] = [None] * len(prompts)
        if choice.column is not None:
            cells = table[choice.column].to_pylist()[::each]
        for cell, prompt, completion in zip(cells, prompts, completions, strict=True):
            new = sum(count or 0 for count in completion)
            count = AdapterCount(rows=1, prompt_tokens=prompt or 0, completion_tokens=new)
            self._add_adapter(choice.group(cell), count)

    def _add_adapter(self, name: str, count: AdapterCount) -> None:
        self.adapters[name] = self.adapters.get(name, AdapterCount()) + count

    def _add_errors(self, table: pa.Table) -> None:
        # Of these columns only: the grouping column may have a type that Arrow cannot filter.
        names = ["error_code", "error_message", "row"]
        failed = pa.table([self._firsts(table[name]) for name in names], names)
        failed = failed.filter(pc.call_function("is_valid", [failed["error_code"]]))
        codes = failed["error_code"].to_pylist()
        self._error_counts.update(codes)
        for position, code in enumerate(codes):
            if len(self._examples[code]) < _MAX_EXAMPLES:
                row = failed["row"][position].as_py()
                message = failed["error_message"][position].as_py()
                self._examples[code].append(RowError(**row, message=message))

    def _add_scores(self, table: pa.Table) -> None:
        each = self._rows_each
        groups: list[str | None] = [None] * (table.num_rows // each)
        if self._by is not None:
            groups = [self._group(value) for value in table[self._by].to_pylist()[::each]]
        for metric in self._metrics:
            values = table[result_columns.score_name(metric)].to_pylist()[::each]
            for value, group in zip(values, groups, strict=True):
                if value is not None:
                    for key in {None, group}:
                        self._scores.setdefault((metric, key), collections.Counter())[value] += 1

    def _group(self, value: object) -> str:
        """The name a value is counted under; beyond `MAX_GROUPS` names all are one."""
        return self._known_group(NULL_GROUP if value is None else str(value))

    def _known_group(self, name: str) -> str:
        if name not in self._groups and len(self._groups) >= MAX_GROUPS:
            name = OTHER_GROUPS
        self._groups.add(name)
        return name


def _sum(values: pa.ChunkedArray) -> int:
    return pc.call_function("sum", [values]).as_py() or 0
