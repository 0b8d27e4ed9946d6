"""The running job: reader, feeder, engine, window and writer, one step after the other.

    reader -> feeder -> engine -> window -> writer -> part files
               (prompts)        (input order)

Memory is bounded by the window: when it is full nothing is read, when its head is finished it is
written.
"""

import contextlib
from collections.abc import Callable, Iterable, Sequence

from jaxpaged.errors import TooManyRowErrors
from jaxpaged.job import output_table, reader
from jaxpaged.job.completion_engine import CompletionEngine
from jaxpaged.job.feeder import Feeder
from jaxpaged.job.interrupt import JobInterrupted
from jaxpaged.job.output_folder import OutputFolder
from jaxpaged.job.planned_job import PlannedJob
from jaxpaged.job.progress import Progress, Snapshot
from jaxpaged.job.prompts import PromptBuilder
from jaxpaged.job.row_window import RowWindow
from jaxpaged.job.tally import Tally
from jaxpaged.job.units import Unit
from jaxpaged.job.writer import PartWriter

# Requests the engine is given at a time, as a multiple of `engine.max_num_seqs`: the running ones
# and twice as many that wait.
_FEED_FACTOR = 3
_SLICE_ROWS = 4096
_WINDOW_ROWS = 4 * _SLICE_ROWS
_WINDOW_BYTES = 128 * 1024 * 1024


class Pipeline:
    """Completes and writes units, in order.

    Args:
        job: The job.
        units: The units that are left.
        tally: Counts the rows of finished parts; holds those of earlier runs.
        engine: Completes prompts.
        progress: Is told how far the job is.

    Attributes:
        feeder: Its counters tell what this run did.

    Raises:
        ConfigError: The model has no chat template and the job needs one.
    """

    def __init__(
        self,
        job: PlannedJob,
        units: Iterable[Unit],
        *,
        tally: Tally,
        engine: CompletionEngine,
        progress: Progress,
    ) -> None:
        self._job = job
        self._tally = tally
        self._engine = engine
        self._progress = progress
        self._rows_before = tally.num_rows
        self._errors_before = tally.num_errors
        self._batches = reader.read(job.inputs, job.columns.needed, units)
        max_num_seqs = job.spec.engine.max_num_seqs
        self._window = RowWindow(
            max_rows=max(_WINDOW_ROWS, 64 * max_num_seqs),
            max_bytes=_WINDOW_BYTES,
            slice_rows=_SLICE_ROWS,
        )
        self.feeder = Feeder(
            self._batches,
            PromptBuilder(job.spec, engine.tokenizer, job.inputs.schema.names),
            engine,
            window=self._window,
            max_unfinished=_FEED_FACTOR * max_num_seqs,
            spec=job.spec,
        )

    def run(self, folder: OutputFolder, should_stop: Callable[[], bool]) -> None:
        """Runs until every row is written; parts appear in the folder as they are finished.

        Raises:
            InputSchemaError: An input file is broken or changed.
            JobError: The output cannot be written.
            JobInterrupted: `should_stop`, asked before every step, said so.
            TooManyRowErrors: More rows failed than `max_errors` allows.
        """
        self._progress.begin(total=self._job.inputs.num_rows, done=self._rows_before)
        try:
            with (
                contextlib.closing(self._batches),
                PartWriter(folder, self._job.columns.output) as writer,
            ):
                while not should_stop():
                    if not self._step(writer):
                        return
                    self._progress.update(self._snapshot())
                raise self._interrupted()
        finally:
            self._engine.abort()
            self._progress.end()

    def _step(self, writer: PartWriter) -> bool:
        """One step of the engine between reading and writing; False when nothing is left."""
        self.feeder.fill()
        if self._engine.has_work():
            self.feeder.collect(self._engine.step())
        has_written = self._write_finished(writer)
        num_errors = self._errors_before + self.feeder.num_errors
        check_errors(self._job, num_errors, self.feeder.first_errors)
        if has_written or self._engine.has_work() or self.feeder.can_feed:
            return True
        assert not len(self._window), f"the engine gave no result for {len(self._window)} rows"
        return False

    def _write_finished(self, writer: PartWriter) -> bool:
        has_written = False
        while finished := self._window.take():
            table = output_table.build(finished, self._job.columns, self._job.spec.eval)
            last = finished[-1].batch
            writer.write(last.unit, table)
            if last.start + len(last) == last.unit.stop:
                # Only what is published counts: the rest of an interrupted unit is dropped.
                self._tally.add_part(self._job.output / last.unit.part_name)
            has_written = True
        return has_written

    def _interrupted(self) -> JobInterrupted:
        done = self._rows_before + self.feeder.num_rows
        return JobInterrupted(
            f"stopped after {done:,} of {self._job.inputs.num_rows:,} rows; the "
            f"{self._tally.num_rows:,} rows of finished parts are kept in {self._job.output}, "
            "running the same job again continues behind them"
        )

    def _snapshot(self) -> Snapshot:
        stats = self._engine.stats
        # Each sampled token but a prompt's first stands for one computed token, its predecessor;
        # what remains are the prompts' tokens, the last of each left out, and recomputed ones.
        computed = stats.prefill_tokens + stats.decode_tokens
        return Snapshot(
            rows=self._rows_before + self.feeder.num_rows,
            errors=self._errors_before + self.feeder.num_errors,
            prompt_tokens=computed - stats.sampled_tokens,
            completion_tokens=stats.sampled_tokens,
            running=stats.running,
            waiting=stats.waiting,
            used_blocks=stats.used_blocks,
            num_blocks=stats.num_blocks,
        )


def check_errors(job: PlannedJob, num_errors: int, examples: Sequence[str]) -> None:
    """Ends a job of which more rows failed than it allows.

    Raises:
        TooManyRowErrors: `num_errors` is above `max_errors`; the message has the examples.
    """
    limit = job.spec.error_limit(job.inputs.num_rows)
    if limit is not None and num_errors > limit:
        raise TooManyRowErrors(
            f"{num_errors:,} row errors, more than max_errors allows ({limit:,}); for example "
            f"{'; '.join(examples)}\nFinished parts are kept in {job.output}; raise max_errors "
            "and run the job again, or correct the input and run it with a new output.path"
        )
