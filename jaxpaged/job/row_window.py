"""The rows between reader and writer: read, handed to the engine, and not yet written.

Results come in any order; batches leave in input order, complete. The window is bounded in rows
and bytes: it says when it is full, and its head leaves early then. Knows nothing of engines and
files.
"""

import collections
import dataclasses
import itertools

from jaxpaged.job.input.row_batch import RowBatch
from jaxpaged.request import ErrorCode, FinishReason


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowResult:
    """What is written for one row beside its own cells, by the names of the output's columns."""

    finish_reason: FinishReason
    completion: str | None = None
    stop_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int = 0
    cached_tokens: int = 0
    error_code: ErrorCode | None = None
    error_message: str | None = None
    seed: int | None = None
    prompt_sha256: str | None = None
    ends_in_partial_character: bool = False
    token_ids: tuple[int, ...] = ()
    prompt: str | None = None


KEPT = RowResult(finish_reason="stop")
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

    @property
    def is_finished(self) -> bool:
        return len(self.results) == len(self.batch)


class RowWindow:
    """Rows in flight, in input order.

    Args:
        max_rows: From so many rows on the window is full.
        max_bytes: From so many bytes of cells on the window is full.
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
        entry = _OpenBatch(batch=batch, results={})
        self._batches.append(entry)
        self._by_row.update(dict.fromkeys(range(batch.start, batch.start + len(batch)), entry))
        self._num_rows += len(batch)
        self._num_bytes += batch.cells.nbytes

    def set_result(self, row: int, result: RowResult) -> None:
        """Keeps the result of the row with this global index; each row has one."""
        self._by_row.pop(row).results[row] = result

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
        self._num_bytes -= entry.batch.cells.nbytes
        start = entry.batch.start
        results = [entry.results[start + offset] for offset in range(len(entry.batch))]
        return FinishedBatch(batch=entry.batch, results=results)
