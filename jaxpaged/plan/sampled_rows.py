"""The rows of a job that a plan looks at, as the requests they become; counted as they pass by."""

import datetime
from collections.abc import Iterator

from jaxpaged.job.input import reader
from jaxpaged.job.input.row_batch import Row
from jaxpaged.job.planned_job import PlannedJob
from jaxpaged.job.prompt.prompt_limit import PromptLimit
from jaxpaged.job.prompt.prompts import Prompt, PromptBuilder
from jaxpaged.job.prompt.row_fault import RowFault, RowSkipped
from jaxpaged.job.units import Unit
from jaxpaged.model.tokenizer import Tokenizer
from jaxpaged.plan.survey import Survey
from jaxpaged.request import Request

PIECES = 50
"""A sample is made of so many pieces at most, evenly spread over the rows."""


class SampledRows:
    """All rows of a job, or some of them.

    Args:
        job: The job.
        tokenizer: The model's.
        max_rows: Most rows to look at.
        max_new: Tokens to assume of a completion at most; None assumes that it runs to its limit.

    Attributes:
        units: The rows that are looked at.
        survey: What they ask for; complete once `requests` was gone through.
        longest: Tokens of the longest one that can run, with its completion.
    """

    def __init__(
        self, job: PlannedJob, tokenizer: Tokenizer, *, max_rows: int, max_new: int | None
    ) -> None:
        self._job = job
        self._max_new = max_new
        # Whole prompts: the policy for those that are too long is applied here, later.
        began = datetime.datetime.fromisoformat(job.history.job.created).replace(tzinfo=None)
        self._builder = PromptBuilder(job.spec, tokenizer, job.inputs.schema.names, moment=began)
        self._limit = PromptLimit(
            job.max_model_len, job.spec.input.on_too_long, bos_id=tokenizer.bos_id
        )
        self._places: dict[int, str] = {}
        self._is_counted = False
        self.units = sample(job.inputs.num_rows, max_rows)
        self.longest = 1
        self.survey = Survey(
            max_model_len=job.max_model_len,
            block_size=job.spec.engine.block_size,
            bos_id=tokenizer.bos_id,
        )

    @property
    def scale(self) -> float:
        """Rows of the job for each one that is looked at."""
        looked_at = sum(unit.num_rows for unit in self.units)
        return self._job.inputs.num_rows / looked_at if looked_at else 1.0

    def requests(self) -> Iterator[Request]:
        """The rows that reach the engine; counted in the survey the first time."""
        is_counting, self._is_counted = not self._is_counted, True
        for batch in reader.read(self._job.inputs, self._job.columns.needed, self.units):
            for row in batch.rows(self._builder.columns):
                request = self._request(row, is_counting)
                if request is not None:
                    yield request

    def reject(self, code: str, request_ids: tuple[int, ...], count: int) -> None:
        """Counts rows that the engine refuses, some of which are named."""
        self.survey.add_faults(code, [self._places[number] for number in request_ids], count)

    def _request(self, row: Row, is_counting: bool) -> Request | None:
        survey = self.survey if is_counting else None
        try:
            row.check()
            prompt = self._builder.build(row.cells)
        except RowFault as fault:
            if survey:
                survey.fault(row.place, fault)
            return None
        except RowSkipped as skip:
            if survey:
                survey.skip(skip)
            return None
        if survey:
            survey.add(prompt)
            self._places[row.number] = row.place
        try:
            ids = self._limit.apply(prompt.whole_ids, max_tokens=prompt.params.max_tokens)
        except RowSkipped as skip:
            if survey:
                survey.skipped[skip.code] += 1
            return None
        new = self._new_tokens(prompt, len(ids))
        if survey and new:
            survey.new_lens.add(new)
            self.longest = max(self.longest, len(ids) + new)
        return Request(
            request_id=row.number, prompt_ids=ids, params=prompt.params, adapter=prompt.adapter
        )

    def _new_tokens(self, prompt: Prompt, num_prompt: int) -> int:
        """Most tokens behind a prompt; 0 where it leaves no room for one."""
        limits = [self._job.max_model_len - num_prompt]
        limits += [
            limit for limit in (prompt.params.max_tokens, self._max_new) if limit is not None
        ]
        return max(0, min(limits))


def sample(num_rows: int, max_rows: int) -> list[Unit]:
    """The rows to look at: all, or so many in pieces that are evenly spread."""
    if num_rows <= max_rows:
        return [Unit(index=0, start=0, stop=num_rows)]
    pieces = min(PIECES, max_rows)
    units = []
    for at in range(pieces):
        start = at * num_rows // pieces
        length = (at + 1) * max_rows // pieces - at * max_rows // pieces
        units.append(Unit(index=at, start=start, stop=start + length))
    return units
