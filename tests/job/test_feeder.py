import contextlib
import itertools
import pathlib
from collections.abc import Callable

import pytest
from job_output import make_units
from scripted_engine import ScriptedEngine

from jaxpaged.job.feeder import Feeder
from jaxpaged.job.input import input_plan, reader
from jaxpaged.job.output.journal import Journal
from jaxpaged.job.prompt.prompts import PromptBuilder
from jaxpaged.job.row_window import KEPT, RowResult, RowWindow
from jaxpaged.job.spec import JobSpec
from jaxpaged.request import Request
from jaxpaged.storage.files import SourceFiles
from jaxpaged.storage.local_store import LocalStore

UNIT_ROWS = 10
NEVER = 10**9


class Run:
    """One run over a file, in units of ten rows; nothing is written, so no unit is committed."""

    def __init__(
        self,
        path: pathlib.Path,
        spec: JobSpec,
        *,
        engine: ScriptedEngine,
        journal: Journal,
        max_unfinished: int = 1000,
        keep: Callable[[int], bool] | None = None,
    ) -> None:
        plan = input_plan.plan([str(path)], files=SourceFiles())
        units = make_units(num_rows=plan.num_rows, rows_per_part=UNIT_ROWS)
        journal.load({unit.index: unit for unit in units}.get)
        self.engine = engine
        self.journal = journal
        self.window = RowWindow(max_rows=1000, max_bytes=10**9, slice_rows=1000)
        self.batches = reader.read(plan, plan.schema.names, units)
        self.feeder = Feeder(
            self.batches,
            PromptBuilder(spec, engine.tokenizer, plan.schema.names),
            engine,
            window=self.window,
            max_unfinished=max_unfinished,
            spec=spec,
            journal=journal,
            keep=keep,
        )
        self.results: list[RowResult] = []

    def steps(self, num_steps: int = NEVER) -> "Run":
        """So many steps of the engine at most; the log has what they finished."""
        self.feeder.fill()
        while num_steps and self.engine.has_work():
            self.feeder.collect(self.engine.step())
            self.journal.flush_if_due()
            self.feeder.fill()
            num_steps -= 1
        while finished := self.window.take():
            self.results += [result for batch in finished for result in batch.results]
        return self

    @property
    def completions(self) -> list[str | None]:
        return [row.samples[0].text if row.samples else None for row in self.results]

    @property
    def asked(self) -> list[int]:
        """The rows that the engine was asked for."""
        return [request.request_id for request in self.engine.requests]


@pytest.fixture
def store(tmp_path) -> LocalStore:
    return LocalStore(tmp_path / "out", private="_jaxpaged", durability="process")


@pytest.fixture
def start(make_spec, engine, store):
    """Starts a run over a file; `double` says how its engine behaves, `spec` has sections."""
    with contextlib.ExitStack() as stack:

        def start(path, *, double=None, spec=None, **options) -> Run:
            run = Run(
                path,
                make_spec(**({"input": {"prompt_column": "q"}} | (spec or {}))),
                engine=engine(**({"max_num_seqs": 1000} | (double or {}))),
                journal=Journal(store, interval=0.0),
                **options,
            )
            stack.enter_context(contextlib.closing(run.batches))
            return run

        yield start


@pytest.fixture
def rows(write_rows) -> pathlib.Path:
    """Thirty rows in row groups that cross the units' borders."""
    return write_rows(q=[f"q{row}" for row in range(30)], row_group_size=7)


def only(finishes) -> dict:
    """An engine that finishes just these rows, in one step, and never the others."""

    def num_steps(request: Request) -> int:
        return 1 if finishes(request.request_id) else NEVER

    return {"num_steps": num_steps}


def logs(store: LocalStore) -> list[bytes | None]:
    folder = "_jaxpaged/journal"
    return [store.read_log(f"{folder}/{name}") for name in store.logs(folder)]


def test_rows_of_the_journal_never_reach_the_engine(start, rows, store):
    before = start(rows).steps()
    written = logs(store)

    after = start(rows).steps()

    assert after.journal.num_rows == 30
    assert after.asked == []
    assert after.results == before.results
    assert after.completions == [f"[q{row}]" for row in range(30)]
    assert (after.feeder.num_rows, after.feeder.num_resumed) == (30, 30)
    assert (before.feeder.num_rows, before.feeder.num_resumed) == (30, 0)
    after.journal.flush()
    assert len(written) == 3
    assert logs(store) == written


def test_the_first_fill_goes_past_the_journals_rows_to_those_that_are_left(start, rows):
    start(rows, double=only(lambda row: row % 2 == 0)).steps(1)
    after = start(rows, max_unfinished=4)

    after.feeder.fill()
    assert after.asked == [1, 3, 5, 7]

    after.steps()
    assert after.asked == list(range(1, 30, 2))
    assert after.completions == [f"[q{row}]" for row in range(30)]
    assert after.feeder.num_resumed == 15


def test_many_rows_of_the_journal_in_front_do_not_keep_the_engine_waiting(start, rows):
    start(rows, double=only(lambda row: row < 28)).steps(1)
    after = start(rows, max_unfinished=1)

    after.feeder.fill()

    assert after.asked == [28]
    assert after.engine.has_work()


def test_each_of_several_killed_runs_adds_to_the_journal(start, rows):
    for stage in range(3):
        run = start(rows, double=only(lambda row, stage=stage: row % 4 == stage)).steps(1)
        assert run.feeder.num_resumed == sum(row % 4 < stage for row in range(30))

    after = start(rows).steps()

    assert after.asked == list(range(3, 30, 4))
    assert after.completions == [f"[q{row}]" for row in range(30)]


def test_equal_prompts_at_different_addresses_are_kept_apart(start, write_rows):
    path = write_rows(q=["same"] * 20, row_group_size=4)
    numbers = itertools.count()
    before = only(lambda row: row in (3, 7, 11)) | {"answer": lambda text: f"old {next(numbers)}"}
    start(path, double=before).steps(1)

    after = start(path, double={"answer": lambda text: "new"}).steps()

    old = {3: "old 0", 7: "old 1", 11: "old 2"}
    assert after.completions == [old.get(row, "new") for row in range(20)]


def test_a_row_with_another_prompt_is_completed_again(start, write_rows):
    path = write_rows(q=["a", "b", "c"])
    start(path).steps()
    path = write_rows(q=["a", "B", "c"])

    after = start(path).steps()

    assert after.asked == [1]
    assert after.completions == ["[a]", "[B]", "[c]"]


def test_errors_of_the_engine_are_resumed_and_those_of_rows_found_again(start, write_rows):
    path = write_rows(q=["ok", None, "x" * 50, "ok"])
    before = start(path, double={"max_model_len": 20}).steps()

    after = start(path, double={"max_model_len": 20}).steps()

    assert after.journal.num_rows == 3
    assert after.asked == []
    assert after.results == before.results
    codes = [result.error_code for result in after.results]
    assert codes == [None, "null_prompt", "prompt_too_long", None]
    assert after.feeder.num_errors == before.feeder.num_errors == 2
    assert (after.feeder.num_rows, after.feeder.num_resumed) == (4, 3)


def test_examples_of_errors_are_addresses_and_codes(start, write_rows):
    secret = "my secret"
    path = write_rows(q=["ok", None, secret * 9, None, None], row_group_size=2)

    run = start(path, double={"max_model_len": 20}).steps()

    assert run.feeder.num_errors == 4
    assert sorted(run.feeder.first_errors) == [
        "rows.parquet, row group 0, row 1: null_prompt",
        "rows.parquet, row group 1, row 1: null_prompt",
        "rows.parquet, row group 2, row 0: null_prompt",
    ]

    path = write_rows(q=[secret * 9])
    run = start(path, double={"max_model_len": 20}).steps()

    assert run.feeder.first_errors == ["rows.parquet, row group 0, row 0: prompt_too_long"]


def test_optional_columns_come_back_with_a_resumed_row(start, rows):
    spec = {"output": {"prompt": True, "token_ids": True}}
    before = start(rows, spec=spec).steps()

    after = start(rows, spec=spec).steps()

    assert after.feeder.num_resumed == 30
    assert after.results == before.results
    assert after.results[4].prompt == "q4"
    assert after.results[4].samples[0].token_ids == (0, 1, 2, 3)


def test_samples_are_of_the_runs_own_rows(start, rows):
    start(rows, double=only(lambda row: row < 5)).steps(1)

    after = start(rows).steps()

    assert [(sample.preview, sample.completion) for sample in after.feeder.samples] == [
        (f"q{row}", f"[q{row}]") for row in (5, 6, 7)
    ]


def test_kept_rows_have_no_prompt_no_count_and_no_record(start, write_rows):
    texts = [f"q{row}" for row in range(30)]
    path = write_rows(q=[None if row in (4, 5) else text for row, text in enumerate(texts)])
    redone = {0, 5, 17}

    run = start(path, keep=lambda row: row not in redone).steps()

    assert run.asked == [0, 17]
    assert [row for row, result in enumerate(run.results) if result is not KEPT] == [0, 5, 17]
    assert [run.completions[row] for row in (0, 5, 17)] == ["[q0]", None, "[q17]"]
    assert (run.feeder.num_rows, run.feeder.num_errors) == (3, 1)
    assert start(path).journal.num_rows == 2


def test_kept_rows_stay_although_the_journal_has_them(start, rows):
    start(rows).steps()

    run = start(rows, keep=lambda row: row != 3).steps()

    assert [row for row, result in enumerate(run.results) if result is not KEPT] == [3]
    assert (run.feeder.num_rows, run.feeder.num_resumed) == (1, 1)
    assert run.asked == []


def test_a_job_of_kept_rows_only_ends_without_the_engine(start, rows):
    run = start(rows, keep=lambda row: True).steps()

    assert all(result is KEPT for result in run.results)
    assert len(run.results) == 30
    assert run.asked == []
    assert not run.feeder.can_feed
