"""Rows to requests just ahead of the engine, and completions back to their rows.

Prompts are made one by one as the engine has room, so that neither prompts nor requests pile up.
A row whose result is in the journal never reaches the engine. Knows nothing of parts and folders.
"""

import collections
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence

from jaxpaged.job import outcomes, units
from jaxpaged.job.completion_engine import CompletionEngine
from jaxpaged.job.input.row_batch import Row, RowBatch
from jaxpaged.job.output.journal import Journal
from jaxpaged.job.output.journal_record import RowAddress
from jaxpaged.job.prompt.prompts import Prompt, PromptBuilder
from jaxpaged.job.prompt.row_fault import RowFault, RowSkipped
from jaxpaged.job.row_window import KEPT, RowResult, RowWindow, SampleResult
from jaxpaged.job.slow_rows import SlowRow, SlowRows
from jaxpaged.job.spec import JobSpec
from jaxpaged.job.token_logprobs import TokenLogprobs
from jaxpaged.job.units import Unit
from jaxpaged.request import Completion, Request, TokenLogprob

MAX_SAMPLES = 3
"""Completions that are kept for people to look at."""

_MAX_EXAMPLES = 3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A completion to show to people.

    Attributes:
        row: The row's address, for people.
        preview: The beginning of what the row asks.
        completion: The text of the first one.
    """

    row: str
    preview: str
    completion: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Pending:
    """What is remembered of a row while the engine has it."""

    unit: Unit
    address: RowAddress
    place: str
    num_prompt_tokens: int
    prompt_sha256: str
    params: str
    prompt: str | None
    truncated_tokens: int
    num_samples: int
    began: float


class Feeder:
    """Moves rows from batches into an engine and results into a window.

    Args:
        batches: The rows.
        builder: Makes the prompts.
        engine: Completes them.
        window: Holds the rows until they are written.
        max_unfinished: Most requests the engine is given at a time.
        spec: The job: which optional columns are kept, and its seed.
        journal: Has rows that earlier runs finished, and is told of those that finish now.
        clock: Seconds, to see how long rows take.
        keep: Whether the row with this global index is to stay as it is: it gets `KEPT` without a
            prompt being made, and no counter counts it.

    Attributes:
        num_rows: Rows with a result so far.
        num_resumed: Those of them whose result was in the journal.
        num_errors: Those of them that ended in an error.
        num_skipped: Those of them that were passed over, as the job wants it.
        outcomes: All rows by how they ended.
        num_special: Rows so far whose text reads like a special token.
        num_answered: Chats so far that end in a message of the assistant, not to be continued.
        first_errors: The first of the errors, as address and code.
        slow_rows: The rows that were with the engine longest.
    """

    def __init__(
        self,
        batches: Iterator[RowBatch],
        builder: PromptBuilder,
        engine: CompletionEngine,
        *,
        window: RowWindow,
        max_unfinished: int,
        spec: JobSpec,
        journal: Journal | None = None,
        keep: Callable[[int], bool] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._batches = batches
        self._builder = builder
        self._engine = engine
        self._window = window
        self._max_unfinished = max_unfinished
        self._spec = spec
        self._journal = journal
        self._is_kept = keep or (lambda row: False)
        self._clock = clock
        self._queue: collections.deque[Row] = collections.deque()
        self._is_exhausted = False
        self._pending: dict[int, _Pending] = {}
        self._previews: dict[int, str] = {}
        self._samples: dict[int, Sample] = {}
        self.num_rows = 0
        self.num_resumed = 0
        self.num_errors = 0
        self.num_skipped = 0
        self.outcomes = outcomes.zeros()
        self.num_special = 0
        self.num_answered = 0
        self.first_errors: list[str] = []
        self.slow_rows = SlowRows()

    @property
    def samples(self) -> tuple[Sample, ...]:
        """The first of this run's own completions, as far as they are there."""
        return tuple(self._samples[row] for row in sorted(self._samples))

    @property
    def can_feed(self) -> bool:
        """Whether there are rows that the window has room for and the engine does not have."""
        return bool(self._queue) or not (self._is_exhausted or self._window.is_full)

    def fill(self) -> None:
        """Gives the engine as many requests as it may have, reading as far as the window allows."""
        while self.can_feed and self._engine.num_unfinished() < self._max_unfinished:
            if self._queue:
                self._submit(self._queue.popleft())
            else:
                self._read_batch()

    def collect(self, completions: list[Completion]) -> None:
        """Puts completions into the window; those of a row are there together, in order."""
        rows = itertools.groupby(completions, key=lambda completion: completion.request_id)
        for row, samples in rows:
            pending = self._pending.pop(row)
            result = self._result(list(samples), pending)
            self._finish(row, result, pending.place)
            self._time(pending, result)
            if self._journal is not None:
                self._journal.add(pending.unit, pending.address, result, params=pending.params)
            preview = self._previews.get(row)
            if result.samples and preview is not None:
                text = result.samples[0].text
                self._samples[row] = Sample(row=pending.place, preview=preview, completion=text)

    def _time(self, pending: _Pending, result: RowResult) -> None:
        self.slow_rows.add(
            SlowRow(
                file=pending.address.file,
                row_group=pending.address.row_group,
                index=pending.address.index,
                seconds=round(self._clock() - pending.began, 3),
                prompt_tokens=pending.num_prompt_tokens,
                completion_tokens=result.completion_tokens,
            )
        )

    def _read_batch(self) -> None:
        batch = next(self._batches, None)
        if batch is None:
            self._is_exhausted = True
            return
        self._window.add(batch)
        numbers = range(batch.start, batch.start + len(batch))
        kept = {number for number in numbers if self._is_kept(number)}
        for number in kept:
            self._window.set_result(number, KEPT)
        # The cells of a batch are not even decoded if none of its rows is completed.
        if len(kept) < len(batch):
            rows = batch.rows(self._builder.columns)
            self._queue.extend(row for row in rows if row.number not in kept)

    def _submit(self, row: Row) -> None:
        try:
            row.check()
            prompt = self._builder.build(row.cells)
        except RowSkipped as skip:
            result = RowResult(skip_reason=skip.code, seed=self._seed(row))
            self._finish(row.number, result, row.place)
            return
        except RowFault as fault:
            self._finish(row.number, self._faulty(row, fault), row.place)
            return
        self.num_special += prompt.has_special_text
        self.num_answered += prompt.ends_in_answer
        pending = self._remember(row, prompt)
        found = self._found(pending)
        if found is not None:
            self.num_resumed += 1
            self._finish(row.number, found, row.place)
            return
        if len(self._previews) < MAX_SAMPLES:
            self._previews[row.number] = self._builder.preview(prompt)
        self._pending[row.number] = pending
        self._engine.add_request(
            Request(
                request_id=row.number,
                prompt_ids=prompt.ids,
                params=prompt.params,
                address=units.address_key(**dataclasses.asdict(pending.address)),
                adapter=prompt.adapter,
            )
        )

    def _remember(self, row: Row, prompt: Prompt) -> _Pending:
        return _Pending(
            unit=row.batch.unit,
            address=RowAddress(file=row.batch.file, row_group=row.batch.row_group, index=row.index),
            place=row.place,
            num_prompt_tokens=len(prompt.ids),
            prompt_sha256=prompt.sha256,
            params=prompt.params_text,
            prompt=self._builder.text(prompt) if self._spec.output.prompt else None,
            truncated_tokens=prompt.truncated,
            num_samples=prompt.params.n,
            began=self._clock(),
        )

    def _found(self, row: _Pending) -> RowResult | None:
        """The row's result if an earlier run had one."""
        if self._journal is None:
            return None
        return self._journal.find(row.unit, row.address, row.prompt_sha256, params=row.params)

    def _result(self, completions: Sequence[Completion], pending: _Pending) -> RowResult:
        first = completions[0]
        is_error = first.error_code is not None
        numbers = [completion.sample for completion in completions]
        wanted = [0] if is_error else list(range(pending.num_samples))
        assert numbers == wanted, f"{pending.place}: samples {numbers}, not {wanted}"
        return RowResult(
            samples=() if is_error else tuple(self._sample(one) for one in completions),
            prompt_tokens=pending.num_prompt_tokens,
            cached_tokens=first.cached_tokens,
            error_code=first.error_code,
            error_message=first.error_message,
            seed=first.seed,
            prompt_sha256=pending.prompt_sha256,
            prompt=pending.prompt,
            prompt_logprobs=_packed(first.prompt_logprobs),
            truncated_tokens=pending.truncated_tokens,
        )

    def _sample(self, completion: Completion) -> SampleResult:
        return SampleResult(
            text=completion.text,
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
            completion_tokens=completion.completion_tokens,
            ends_in_partial_character=completion.ends_in_partial_character,
            token_ids=completion.token_ids if self._spec.output.token_ids else (),
            cumulative_logprob=completion.cumulative_logprob,
            score=completion.score,
            logprobs=_packed(completion.logprobs),
        )

    def _faulty(self, row: Row, fault: RowFault) -> RowResult:
        return RowResult(
            error_code=fault.code,
            error_message=fault.reason,
            seed=self._seed(row),
        )

    def _seed(self, row: Row) -> int:
        """The row's own seed if it has a valid one, or the job's; as the engine would choose."""
        sampling = self._spec.sampling
        own = row.cells.get(sampling.columns.seed) if sampling.columns.seed else None
        if isinstance(own, int) and 0 <= own < 2**63:
            return own
        return self._spec.seed if sampling.seed is None else sampling.seed

    def _finish(self, row: int, result: RowResult, place: str) -> None:
        self._window.set_result(row, result)
        self.num_rows += 1
        self.outcomes[result.finish_reason, result.error_code] += 1
        self.num_skipped += result.skip_reason is not None
        if result.error_code is not None:
            self.num_errors += 1
            if len(self.first_errors) < _MAX_EXAMPLES:
                self.first_errors.append(f"{place}: {result.error_code}")


def _packed(tokens: Sequence[TokenLogprob] | None) -> TokenLogprobs | None:
    return None if tokens is None else TokenLogprobs.pack(tokens)
