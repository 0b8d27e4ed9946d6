"""Counts over written rows: errors, tokens, how completions ended, scores.

Everything is counted from the rows as they stand in the output, so that a run that finds finished
parts counts them like its own.
"""

import collections
import dataclasses
import pathlib
from typing import BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from jaxpaged.job import columns
from jaxpaged.job.sections import EvalSpec

MAX_GROUPS = 100
OTHER_GROUPS = "(other)"
NULL_GROUP = "(null)"

_MAX_EXAMPLES = 3


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
        overall: Over all rows that could be scored; a failed row counts as wrong.
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
class Counts:
    """What some rows come to, as a value: the content of a `Tally`.

    Attributes:
        rows: Rows.
        finish_reasons: Rows by finish reason.
        tokens: Sums of prompt, completion and cached tokens.
        partial_characters: Completions cut inside a character.
        errors: Failed rows by code.
        examples: The first failed rows by code.
        scores: By metric and group.
    """

    rows: int
    finish_reasons: dict[str, int]
    tokens: dict[str, int]
    partial_characters: int
    errors: dict[str, int]
    examples: dict[str, tuple[RowError, ...]]
    scores: tuple[GroupScore, ...]


class Tally:
    """Running counts.

    Args:
        scoring: What was scored; None for nothing.

    Attributes:
        columns: The output columns that are counted.
        num_rows: Rows.
        finish_reasons: Rows by finish reason.
        tokens: Sums of prompt, completion and cached tokens.
        num_partial_characters: Completions cut inside a character.
    """

    def __init__(self, scoring: EvalSpec | None) -> None:
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
        self.columns = (
            *("finish_reason", "error_code", "error_message", "row"),
            *("prompt_tokens", "completion_tokens", "cached_tokens"),
            "ends_in_partial_character",
            *(columns.score_name(metric) for metric in self._metrics),
            *((self._by,) if self._by else ()),
        )

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
            for batch in file.iter_batches(columns=list(self.columns)):
                self.add(pa.Table.from_batches([batch]))

    def add_counts(self, counts: Counts) -> None:
        """Counts what was counted before."""
        self.num_rows += counts.rows
        self.finish_reasons.update(counts.finish_reasons)
        self.tokens.update(counts.tokens)
        self.num_partial_characters += counts.partial_characters
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
        )

    def add(self, table: pa.Table) -> None:
        """Counts the rows of a table that has at least `columns`."""
        self.num_rows += table.num_rows
        self.finish_reasons.update(table["finish_reason"].to_pylist())
        for kind in ("prompt", "completion", "cached"):
            self.tokens[kind] += _sum(table[f"{kind}_tokens"])
        self.num_partial_characters += _sum(table["ends_in_partial_character"])
        self._add_errors(table)
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

    def _add_errors(self, table: pa.Table) -> None:
        # Of these columns only: the grouping column may have a type that Arrow cannot filter.
        failed = table.select(["error_code", "error_message", "row"])
        failed = failed.filter(pc.call_function("is_valid", [failed["error_code"]]))
        codes = failed["error_code"].to_pylist()
        self._error_counts.update(codes)
        for position, code in enumerate(codes):
            if len(self._examples[code]) < _MAX_EXAMPLES:
                row = failed["row"][position].as_py()
                message = failed["error_message"][position].as_py()
                self._examples[code].append(RowError(**row, message=message))

    def _add_scores(self, table: pa.Table) -> None:
        groups: list[str | None] = [None] * table.num_rows
        if self._by is not None:
            groups = [self._group(value) for value in table[self._by].to_pylist()]
        for metric in self._metrics:
            values = table[columns.score_name(metric)].to_pylist()
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
