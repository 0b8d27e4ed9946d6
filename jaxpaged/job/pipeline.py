"""The running job: reader, feeder, engine, window and writer, one step after the other.

    reader -> feeder -> engine -> window -> writer -> committed parts
               (prompts)  |     (input order)
                       journal

Memory is bounded by the window: when it is full nothing is read, when its head is finished it is
written.
"""

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence

from jaxpaged.errors import OutputConflictError, StorageError, TooManyRowErrors
from jaxpaged.job.completion_engine import CompletionEngine
from jaxpaged.job.feeder import Feeder
from jaxpaged.job.input import reader
from jaxpaged.job.interrupt import JobInterrupted
from jaxpaged.job.output import output_table
from jaxpaged.job.output.journal import Journal
from jaxpaged.job.output.output_folder import OutputFolder
from jaxpaged.job.output.parent_rows import ParentRows
from jaxpaged.job.output.writer import PartWriter
from jaxpaged.job.planned_job import PlannedJob
from jaxpaged.job.progress import Progress, Snapshot
from jaxpaged.job.row_window import FinishedBatch, RowWindow
from jaxpaged.job.tally import Tally
from jaxpaged.job.timeline import TimelineRecorder
from jaxpaged.job.units import Unit

# Requests the engine is given at a time, as a multiple of `engine.max_num_seqs`: the running ones
# and twice as many that wait.
FEED_FACTOR = 3
_SLICE_ROWS = 4096
_WINDOW_ROWS = 4 * _SLICE_ROWS
_SHOWN = 3
_WINDOW_BYTES = 128 * 1024 * 1024


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a run has to do.

    Attributes:
        units: The units that are left, in order.
        total: Rows to complete, those that are done included.
        done: Rows that are committed already.
        errors: How many of them failed.
        examples: Some of those, as address and code.
        skipped: How many of them were passed over.
        parent: The rows that stay as they are; None if all are completed.
    """

    units: Iterable[Unit]
    total: int
    done: int
    errors: int
    examples: Sequence[str] = ()
    skipped: int = 0
    parent: ParentRows | None = None


class Pipeline:
    """Completes and commits units, in order.

    Args:
        job: The job.
        work: What is left of it.
        engine: Completes prompts.
        journal: Keeps finished rows of units in flight.
        tally: Counts the rows of committed parts.
        progress: Is told how far the job is.

    Attributes:
        feeder: Its counters tell what this run did.
        timeline: What the engine did meanwhile.

    Raises:
        ConfigError: The model has no chat template and the job needs one.
    """

    def __init__(
        self,
        job: PlannedJob,
        work: Work,
        engine: CompletionEngine,
        *,
        journal: Journal,
        tally: Tally,
        progress: Progress,
    ) -> None:
        self._job = job
        self._work = work
        self._engine = engine
        self._journal = journal
        self._tally = tally
        self._progress = progress
        self._batches = reader.read(job.inputs, job.columns.needed, work.units)
        max_num_seqs = job.spec.engine.max_num_seqs
        self._window = RowWindow(
            max_rows=max(_WINDOW_ROWS, 64 * max_num_seqs),
            max_bytes=_WINDOW_BYTES,
            slice_rows=_SLICE_ROWS,
        )
        self.feeder = Feeder(
            self._batches,
            job.prompt_builder(engine.tokenizer),
            engine,
            window=self._window,
            max_unfinished=FEED_FACTOR * max_num_seqs,
            spec=job.spec,
            journal=journal,
            keep=work.parent.is_kept if work.parent else None,
        )
        self.timeline = TimelineRecorder(engine.stats)

    def run(self, folder: OutputFolder, should_stop: Callable[[], bool]) -> None:
        """Runs until every row is committed; parts appear as their units are finished.

        However it ends, finished rows of units in flight are in the journal then.

        Raises:
            InputSchemaError: An input file is broken or changed.
            JobError: The output cannot be written.
            JobInterrupted: `should_stop`, asked before every step, said so.
            TooManyRowErrors: More rows failed than `max_errors` allows.
            AssertionError: The engine's blocks do not add up at the end.
        """
        self._progress.begin(
            total=self._work.total, done=self._work.done, journaled=self._journal.num_rows
        )
        try:
            with (
                contextlib.closing(self._batches),
                PartWriter(folder) as writer,
                self._warm_engine(),
            ):
                while not should_stop():
                    if not self._step(writer):
                        self._engine.check_integrity()
                        return
                    self.timeline.look()
                    self._progress.update(self._snapshot())
                self._journal.flush()
                raise self._interrupted()
        except OutputConflictError:
            # Another process is the writer now: nothing is written any more.
            raise
        except BaseException:
            # What ended the run matters more than the journal, which a full disk refuses too.
            with contextlib.suppress(StorageError):
                self._journal.flush()
            raise
        finally:
            self._engine.abort()
            self._progress.end()

    @contextlib.contextmanager
    def _warm_engine(self) -> Iterator[None]:
        """Compiles the engine's programs for the first rows, before the first step."""
        self.feeder.fill()
        if self._engine.has_work():
            self._engine.warm_up()
            self.timeline.look()
        # Everything that is there now stays: without this, each full collection walks it (100 ms
        # with JAX's modules) while the device may wait for the next step. Nothing is collected
        # before, which would take as long: what is garbage now is so for the time of the job.
        gc.freeze()
        try:
            yield
        finally:
            gc.unfreeze()

    def _step(self, writer: PartWriter) -> bool:
        """One step of the engine between reading and writing; False when nothing is left."""
        self.feeder.fill()
        if self._engine.has_work():
            self.feeder.collect(self._engine.step())
        has_written = self._write_finished(writer)
        self._journal.flush_if_due()
        num_errors = self._work.errors + self.feeder.num_errors
        examples = [*self._work.examples, *self.feeder.first_errors]
        check_errors(self._job, num_errors, examples)
        if has_written or self._engine.has_work() or self.feeder.can_feed:
            return True
        assert not len(self._window), f"the engine gave no result for {len(self._window)} rows"
        return False

    def _write_finished(self, writer: PartWriter) -> bool:
        has_written = False
        while finished := self._window.take():
            self._write(finished, writer)
            has_written = True
        return has_written

    def _write(self, finished: Sequence[FinishedBatch], writer: PartWriter) -> None:
        unit, parent = finished[0].batch.unit, self._work.parent
        table = output_table.build(finished, self._job.columns, self._job.spec.eval)
        if parent is not None:
            table = parent.merged(unit, finished[0].batch.start, table)
        if not writer.write(unit, table):
            return
        self._job.inputs.check_unchanged(unit)
        # Only what is committed counts: the rest of an interrupted unit is in the journal.
        self._tally.add_counts(writer.commit(unit).counts())
        self._journal.drop(unit)
        if parent is not None:
            parent.forget(unit)

    def _interrupted(self) -> JobInterrupted:
        done = self._work.done + self.feeder.num_rows
        return JobInterrupted(
            f"stopped after {done:,} of {self._work.total:,} rows, which are kept in "
            f"{self._job.store.url}; the same command continues behind them"
        )

    def _snapshot(self) -> Snapshot:
        stats = self._engine.stats
        # Each sampled token but a prompt's first stands for one computed token, its predecessor;
        # what remains are the prompts' tokens, the last of each left out, and recomputed ones.
        computed = stats.prefill_tokens + stats.decode_tokens
        return Snapshot(
            rows=self._work.done + self.feeder.num_rows,
            resumed=self._work.done + self.feeder.num_resumed,
            errors=self._work.errors + self.feeder.num_errors,
            skipped=self._work.skipped + self.feeder.num_skipped,
            # The samples of a row have one prompt, and each of them a first token.
            prompt_tokens=max(0, computed - stats.sampled_tokens),
            completion_tokens=stats.sampled_tokens,
            running=stats.running,
            waiting=stats.waiting,
            used_blocks=stats.used_blocks,
            num_blocks=stats.num_blocks,
            outcomes=self.feeder.outcomes,
            engine=stats,
        )


def check_errors(job: PlannedJob, num_errors: int, examples: Sequence[str]) -> None:
    """Ends a job of which more rows failed than it allows.

    Raises:
        TooManyRowErrors: `num_errors` is above `max_errors`; the message has the examples.
    """
    limit = job.spec.error_limit(job.inputs.num_rows)
    if limit is not None and num_errors > limit:
        shown = "; ".join(examples[:_SHOWN])
        raise TooManyRowErrors(
            f"{num_errors:,} row errors, more than max_errors allows ({limit:,}); for example "
            f"{shown}\nFinished rows are kept in {job.store.url}; raise max_errors "
            "and run the job again, or correct the input and run it with a new output.path"
        )
