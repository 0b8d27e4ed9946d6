"""The rows between reader and writer: read, handed to the engine, and not yet written.

Results come in any order; batches leave in input order, complete. The window is bounded in rows
and bytes: it says when it is full, and its head leaves early then. Knows nothing of engines and
files.
"""

import collections
import dataclasses
import itertools
from collections.abc import Sequence
from typing import TypeVar

from jaxpaged.job.input.row_batch import RowBatch
from jaxpaged.job.token_logprobs import TokenLogprobs
from jaxpaged.request import ErrorCode, FinishReason

_TOKEN_BYTES = 4

# Of a damaged part, a reason may be anything.
_Reason = TypeVar("_Reason")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SampleResult:
    """One completion of a row, by the names that the output has for it.

    Attributes that need words: see `jaxpaged.request.Completion`.
    """

    text: str
    finish_reason: FinishReason
    stop_reason: str | None = None
    completion_tokens: int = 0
    ends_in_partial_character: bool = False
    token_ids: tuple[int, ...] = ()
    cumulative_logprob: float | None = None
    score: float | None = None
    logprobs: TokenLogprobs | None = None

    @property
    def num_bytes(self) -> int:
        """The memory it takes, about."""
        num_bytes = len(self.text) + _TOKEN_BYTES * len(self.token_ids)
        return num_bytes + (self.logprobs.num_bytes if self.logprobs else 0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowResult:
    """What is written for one row beside its own cells, by the names of the output's columns.

    A row has samples, or an error, or a reason to be skipped.

    Attributes:
        samples: The row's completions, in order.
        skip_reason: Why the row was passed over; None if it was not.
        truncated_tokens: Tokens that were cut out of the prompt.
    """

    samples: tuple[SampleResult, ...] = ()
    prompt_tokens: int | None = None
    cached_tokens: int = 0
    error_code: ErrorCode | None = None
    error_message: str | None = None
    skip_reason: str | None = None
    seed: int | None = None
    prompt_sha256: str | None = None
    prompt: str | None = None
    prompt_logprobs: TokenLogprobs | None = None
    truncated_tokens: int = 0

    @property
    def finish_reason(self) -> FinishReason:
        """How the row ended."""
        if self.error_code is not None:
            return "error"
        if self.skip_reason is not None:
            return "skipped"
        return row_finish_reason([sample.finish_reason for sample in self.samples])

    @property
    def stop_reason(self) -> str | None:
        """Why the row ended so; several samples have reasons of their own."""
        if self.skip_reason is not None:
            return self.skip_reason
        return self.samples[0].stop_reason if len(self.samples) == 1 else None

    @property
    def completion_tokens(self) -> int:
        """Tokens of all samples."""
        return sum(sample.completion_tokens for sample in self.samples)

    @property
    def ends_in_partial_character(self) -> bool:
        """Whether any sample does."""
        return any(sample.ends_in_partial_character for sample in self.samples)

    @property
    def num_bytes(self) -> int:
        """The memory it takes, about."""
        num_bytes = sum(sample.num_bytes for sample in self.samples)
        num_bytes += len(self.prompt or "")
        return num_bytes + (self.prompt_logprobs.num_bytes if self.prompt_logprobs else 0)


def row_finish_reason(reasons: Sequence[_Reason]) -> _Reason:
    """How a row ended whose samples ended so: "length" if any did."""
    return next((reason for reason in reasons if reason == "length"), reasons[0])


KEPT = RowResult(skip_reason="kept")
"""Stands for the result of a row that is not completed at all: the writer puts the row in its
place that an earlier revision wrote. Told from others by identity."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FinishedBatch:
    """A batch with a result for each of its rows."""

    batch: RowBatch
    results: list[RowResult]


@dataclasses.dataclass(slots=True, kw_only=True)
class _OpenBatch:
    batch: RowBatch
    results: dict[int, RowResult]
    num_bytes: int

    @property
    def is_finished(self) -> bool:
        return len(self.results) == len(self.batch)


class RowWindow:
    """Rows in flight, in input order.

    Args:
        max_rows: From so many rows on the window is full.
        max_bytes: From so many bytes of cells and results on the window is full.
        slice_rows: So many finished rows at the head leave before their unit is finished.
    """

    def __init__(self, *, max_rows: int, max_bytes: int, slice_rows: int) -> None:
        self._max_rows = max_rows
        self._max_bytes = max_bytes
        self._slice_rows = slice_rows
        self._batches: collections.deque[_OpenBatch] = collections.deque()
        self._by_row: dict[int, _OpenBatch] = {}
        self._num_rows = 0
        self._num_bytes = 0

    def __len__(self) -> int:
        return self._num_rows

    @property
    def is_full(self) -> bool:
        """Whether no further batch should be read now."""
        return self._num_rows >= self._max_rows or self._num_bytes >= self._max_bytes

    def add(self, batch: RowBatch) -> None:
        """Takes in the batch that follows the last one."""
        entry = _OpenBatch(batch=batch, results={}, num_bytes=batch.cells.nbytes)
        self._batches.append(entry)
        self._by_row.update(dict.fromkeys(range(batch.start, batch.start + len(batch)), entry))
        self._num_rows += len(batch)
        self._num_bytes += entry.num_bytes

    def set_result(self, row: int, result: RowResult) -> None:
        """Keeps the result of the row with this global index; each row has one."""
        entry = self._by_row.pop(row)
        entry.results[row] = result
        entry.num_bytes += result.num_bytes
        self._num_bytes += result.num_bytes

    def take(self) -> list[FinishedBatch]:
        """The finished batches at the head, all of one unit.

        Empty as long as the rest of the unit may follow soon, so that a unit is written in few
        pieces.
        """
        if not self._batches:
            return []
        unit = self._batches[0].batch.unit
        ready = list(
            itertools.takewhile(
                lambda entry: entry.is_finished and entry.batch.unit is unit, self._batches
            )
        )
        num_rows = sum(len(entry.batch) for entry in ready)
        ends_unit = bool(ready) and ready[-1].batch.start + len(ready[-1].batch) == unit.stop
        if not (ends_unit or self.is_full or num_rows >= self._slice_rows):
            return []
        return [self._leave(entry) for entry in ready]

    def _leave(self, entry: _OpenBatch) -> FinishedBatch:
        self._batches.popleft()
        self._num_rows -= len(entry.batch)
        self._num_bytes -= entry.num_bytes
        start = entry.batch.start
        results = [entry.results[start + offset] for offset in range(len(entry.batch))]
        return FinishedBatch(batch=entry.batch, results=results)
