import dataclasses
import datetime
import io
import json
import pathlib
import subprocess
import sys

import folder_stamps
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import rich.console
from job_output import Watch, parts, rows
from scripted_engine import ScriptedEngine
from stop_after import StopAfter
from tiny import write_tiny_llama

from jaxpaged.errors import OutputConflictError, TooManyRowErrors
from jaxpaged.job import report_table
from jaxpaged.job.interrupt import JobInterrupted
from jaxpaged.job.output import commit, history, journal, output_view
from jaxpaged.job.output.attempt import Attempt
from jaxpaged.job.output.output_view import PRIVATE
from jaxpaged.job.planned_job import RunOptions
from jaxpaged.job.retry import retry_job
from jaxpaged.job.runner import run_job
from jaxpaged.model.checkpoint import open_checkpoint
from jaxpaged.storage.local_store import LocalStore

SMALL = {
    "input": {"prompt_column": "q"},
    "output": {"rows_per_part": 8},
    "engine": {"max_num_seqs": 4},
}
REPAIRS = RunOptions(repairs=True)


def stop(spec, double, num_steps: int, **options) -> None:
    with pytest.raises(JobInterrupted):
        run_job(spec, engine=double, should_stop=StopAfter(num_steps), **options)


def asked(double) -> list[int]:
    return [request.request_id for request in double.requests]


@pytest.fixture
def spec(write_rows, make_spec):
    """Of forty rows in two files and five parts."""
    write_rows("a.parquet", id=list(range(25)), q=[f"q{i}" for i in range(25)], row_group_size=11)
    write_rows("b.parquet", id=list(range(25, 40)), q=[f"q{i}" for i in range(25, 40)])
    return make_spec(**SMALL)


def test_rows_with_a_verdict_never_reach_the_engine_again(write_rows, make_spec, engine, out):
    # Every second row is an error of the engine's; each takes another number of steps.
    write_rows(id=list(range(24)), q=["good", "x" * 40] * 12)
    spec = make_spec(**SMALL)
    options = {"max_model_len": 32, "num_steps": lambda request: 1 + request.request_id % 3}
    done: set[int] = set()
    for _ in range(4):
        double = engine(max_num_seqs=4, **options)
        finished: list[int] = []
        step = double.step

        def noted(step=step, finished=finished) -> list:
            completions = step()
            finished += [completion.request_id for completion in completions]
            return completions

        double.step = noted
        stop(spec, double, 2)
        assert done.isdisjoint(asked(double))
        done |= set(finished)
    assert any(row % 2 for row in done)
    double = engine(**options)

    report = run_job(spec, engine=double)

    assert sorted(asked(double)) == sorted(set(range(24)) - done)
    assert report.run.rows + report.run.rows_resumed + 8 * report.run.parts_kept == 24
    assert [row["error_code"] for row in rows(out)] == [None, "prompt_too_long"] * 12
    assert report.num_errors == 12
    double = engine(**options)
    assert run_job(spec, engine=double).state == "already finished"
    assert asked(double) == []


def test_finished_parts_keep_their_bytes_over_many_stops(spec, engine, out):
    seen: folder_stamps.Stamps = {}
    double = engine(max_num_seqs=4)

    for _ in range(9):
        stop(spec, double, 1)
        found = folder_stamps.of_parts(out)
        assert folder_stamps.kept(seen, found)
        assert [row["id"] for row in rows(out)] == list(range(8 * len(found)))
        seen = found
    assert len(seen) == 4
    run_job(spec, engine=double)

    assert folder_stamps.kept(seen, folder_stamps.of_parts(out))
    assert [row["completion"] for row in rows(out)] == [f"[q{i}]" for i in range(40)]


def test_other_sizes_of_the_engine_continue_the_same_parts(spec, make_spec, engine, out):
    stop(spec, engine(max_num_seqs=4), 5)
    before = folder_stamps.of_parts(out)
    assert len(before) == 2
    other = make_spec(
        input={"prompt_column": "q"},
        output={"rows_per_part": 8, "journal_interval": 0.0},
        engine={"max_num_seqs": 3, "block_size": 4, "max_num_batched_tokens": 256},
    )

    stop(other, engine(max_num_seqs=3), 2)
    double = engine(max_num_seqs=16)
    report = run_job(make_spec(**SMALL | {"engine": {"max_num_seqs": 16}}), engine=double)

    assert folder_stamps.kept(before, folder_stamps.of_parts(out))
    assert min(asked(double)) >= 26
    assert report.run.rows == len(double.requests) == 14
    assert [row["completion"] for row in rows(out)] == [f"[q{i}]" for i in range(40)]


def test_a_resumed_job_generates_in_its_first_step_with_all_its_lanes(spec, engine):
    fresh = engine(max_num_seqs=4)
    stop(spec, fresh, 3)

    for _ in range(3):
        double, watch = engine(max_num_seqs=4), Watch()
        stop(spec, double, 1, progress=watch)
        # The first step had everything that waits, and ran as many as it may.
        assert double.stats.steps == 1
        assert double.max_unfinished == fresh.max_unfinished == 12
        assert double.stats.running == 4
        assert [snapshot.new_rows for snapshot in watch.snapshots] == [4]


def test_rows_of_the_same_prompt_are_kept_one_by_one(write_rows, make_spec, engine, out):
    write_rows(id=list(range(20)), q=["same"] * 20)
    spec = make_spec(**SMALL | {"output": {"rows_per_part": 20}})
    # The later rows of those in flight are done first.
    slow = engine(
        answer=lambda text: f"first {text}",
        num_steps=lambda request: 3 - request.request_id % 3,
        max_num_seqs=6,
    )
    stop(spec, slow, 2)
    double = engine(answer=lambda text: f"second {text}")

    report = run_job(spec, engine=double)

    kept = [row["id"] for row in rows(out) if row["completion"] == "first same"]
    assert kept == sorted(set(range(20)) - set(asked(double)))
    assert 0 < len(kept) == report.run.rows_resumed
    assert kept != list(range(len(kept)))
    assert [row["id"] for row in rows(out)] == list(range(20))
    assert {row["completion"] for row in rows(out)} == {"first same", "second same"}


def test_a_chat_that_tells_the_time_has_that_of_the_job_s_beginning(
    write_rows, make_spec, out, tmp_path
):
    template = "{{ strftime_now('%Y-%m-%d %H:%M:%S') }} {{ messages[0]['content'] }}"
    model = write_tiny_llama(tmp_path / "model", chat_template=template, add_bos=False)
    double = ScriptedEngine(open_checkpoint(model).tokenizer(), max_num_seqs=1)
    write_rows(id=[0, 1, 2, 3], q=["a", "b", "c", "d"])
    spec = make_spec(
        model=str(model),
        input={"messages": [{"role": "user", "content": "{{ q }}"}]},
        output={"prompt": True, "rows_per_part": 1},
        engine={"max_num_seqs": 1},
    )
    stop(spec, double, 1)
    record = json.loads((out / history.JOB).read_text())
    began = datetime.datetime.fromisoformat(record["created"])
    # As if that had been long ago.
    earlier = began - datetime.timedelta(days=400)
    (out / history.JOB).write_text(json.dumps(record | {"created": earlier.isoformat()}))

    run_job(spec, engine=double)
    retry_job(str(out), where="id = 3", engine=double)

    times = [began, earlier, earlier, earlier]
    assert [row["prompt"] for row in rows(out)] == [
        f"{time:%Y-%m-%d %H:%M:%S} {q}" for time, q in zip(times, "abcd", strict=True)
    ]


def test_no_rows_and_no_row_groups_are_finished_and_stay_so(write_rows, make_spec, engine, out):
    path = write_rows("a.parquet", q=pa.array([], pa.string()))
    pq.ParquetWriter(path.with_name("b.parquet"), pa.schema([("q", pa.string())])).close()
    assert pq.read_metadata(path.with_name("b.parquet")).num_row_groups == 0
    spec = make_spec(**SMALL)
    double = engine()

    report = run_job(spec, engine=double)
    (out / "_SUCCESS").unlink()
    again = run_job(spec, engine=double)

    for one in (report, again):
        assert (one.state, one.output.parts, one.output.rows) == ("finished", 1, 0)
        assert one.warnings == ("the input has no rows",)
    assert run_job(spec).state == "already finished"
    assert rows(out) == []
    assert double.stats.steps == 0


def test_rows_behind_files_without_rows_are_resumed(write_rows, make_spec, engine, out):
    empty = pa.array([], pa.string())
    write_rows("a.parquet", q=empty)
    write_rows("b.parquet", q=[f"q{i}" for i in range(10)], row_group_size=3)
    write_rows("c.parquet", q=empty)
    write_rows("d.parquet", q=[f"q{i}" for i in range(10, 13)])
    spec = make_spec(**SMALL)

    stop(spec, engine(max_num_seqs=1), 9)
    double = engine()
    run_job(spec, engine=double)

    assert asked(double) == [9, 10, 11, 12]
    assert [row["completion"] for row in rows(out)] == [f"[q{i}]" for i in range(13)]


def test_a_unit_larger_than_the_files_is_resumed_in_its_middle(write_rows, make_spec, engine, out):
    for number in range(5):
        write_rows(f"{number}.parquet", q=[f"q{2 * number}", f"q{2 * number + 1}"])
    spec = make_spec(**SMALL | {"output": {"rows_per_part": 100}})

    for num_steps in (3, 2):
        stop(spec, engine(max_num_seqs=1), num_steps)
        assert parts(out) == []
    double = engine()
    report = run_job(spec, engine=double)

    assert asked(double) == [5, 6, 7, 8, 9]
    assert (report.output.parts, report.run.rows_resumed) == (1, 5)
    assert [row["completion"] for row in rows(out)] == [f"[q{i}]" for i in range(10)]
    assert [row["row"]["file"] for row in rows(out)][::2] == [f"{n}.parquet" for n in range(5)]


def test_resumed_rows_are_told_apart(spec, engine, out):
    # The first part is committed; of the second three rows are done, and one of the third.
    slow = engine(max_num_seqs=4, num_steps=lambda r: 9 if r.request_id in (11, 14) else 1)
    stop(spec, slow, 3)
    watch = Watch()

    report = run_job(spec, engine=engine(max_num_seqs=4), progress=watch)

    assert watch.begun == (40, 8, 3)
    assert watch.notes == ["a scripted engine"]
    first, last = watch.snapshots[0], watch.snapshots[-1]
    assert (first.rows, first.resumed, first.new_rows) == (15, 11, 4)
    assert (last.rows, last.resumed, last.new_rows) == (40, 11, 29)
    run = report.run
    assert (run.attempt, run.parts_kept, run.rows_resumed, run.rows) == (2, 1, 3, 29)
    text = io.StringIO()
    report_table.show(report, rich.console.Console(file=text, width=120))
    assert "40 of 40 (29 in this run, 11 resumed)" in text.getvalue()
    stored = json.loads((out / output_view.REPORT).read_text())
    assert stored["run"]["rows_resumed"] == 3


def test_a_stop_says_how_much_is_kept_and_keeps_it(spec, engine, out):
    with pytest.raises(JobInterrupted) as caught:
        run_job(spec, engine=engine(max_num_seqs=4), should_stop=StopAfter(3))

    assert str(caught.value) == (
        f"stopped after 12 of 40 rows, which are kept in {out}; the same command continues behind "
        "them"
    )
    report = json.loads((out / output_view.REPORT).read_text())
    assert (report["state"], report["output"]["rows"]) == ("stopped", 8)
    double = engine()
    run_job(spec, engine=double)
    assert asked(double) == list(range(12, 40))


def test_a_job_of_which_only_the_mark_is_missing_is_marked(spec, engine, out):
    stop(spec, engine(max_num_seqs=4), 5)
    logs = {path: path.read_bytes() for path in (out / journal.FOLDER).iterdir()}
    assert [path.name for path in logs] == ["000002"]
    stop(spec, engine(max_num_seqs=4), 5)
    assert len(parts(out)) == 5
    before = folder_stamps.of_parts(out)
    # As if the kill had come before the journal was removed, too.
    for path, data in logs.items():
        path.write_bytes(data)
    double = engine()

    report = run_job(spec, engine=double)

    assert (report.state, report.run.rows, report.output.rows) == ("finished", 0, 40)
    assert asked(double) == []
    assert folder_stamps.of_parts(out) == before
    assert list((out / journal.FOLDER).iterdir()) == []


def test_failed_rows_of_earlier_runs_count_towards_the_limit(write_rows, make_spec, engine, out):
    write_rows(q=[*[None, "a"] * 8, *["x" * 40, "a"] * 8])
    sections = SMALL | {"output": {"rows_per_part": 4}}

    stop(make_spec(**sections), engine(max_num_seqs=4, max_model_len=32), 3)
    assert len(parts(out)) >= 3
    double = engine(max_num_seqs=4, max_model_len=32)
    with pytest.raises(TooManyRowErrors, match=r"more than max_errors allows \(9\)"):
        run_job(make_spec(max_errors=9, **sections), engine=double)
    with pytest.raises(TooManyRowErrors, match=r"more than max_errors allows \(2\)"):
        run_job(make_spec(max_errors=2, **sections), engine=double)
    report = run_job(make_spec(max_errors=16, **sections), engine=double)

    assert report.num_errors == 16
    assert len(rows(out)) == 32


def test_a_finished_job_needs_neither_model_nor_jax(spec, engine, out, tmp_path):
    run_job(spec, engine=engine())
    before = folder_stamps.of_parts(out)
    job = tmp_path / "job.json"
    job.write_text(spec.model_dump_json(exclude_none=True))
    script = (
        "import json, sys\n"
        "from jaxpaged.job.runner import run_job\n"
        "from jaxpaged.job.spec import JobSpec\n"
        "print(run_job(JobSpec.from_dict(json.load(open(sys.argv[1])))).state)\n"
        "sys.exit(str(sorted({'jax', 'jaxlib', 'flax'} & set(sys.modules)) or ''))\n"
    )

    command = [sys.executable, "-W", "ignore", "-c", script, str(job)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)

    assert (result.stdout, result.stderr) == ("already finished\n", "\n")
    assert folder_stamps.of_parts(out) == before


def test_a_part_whose_record_was_lost_is_adopted(spec, engine, out):
    stop(spec, engine(max_num_seqs=4), 5)
    before = folder_stamps.of_parts(out)
    (out / commit.record_name(1, 0)).unlink()
    double, watch = engine(), Watch()

    report = run_job(spec, engine=double, progress=watch)

    assert watch.notes[0] == "part-000001.parquet was whole, and is committed now"
    assert (report.run.parts_kept, report.run.parts_adopted) == (2, 1)
    assert asked(double) == list(range(20, 40))
    assert folder_stamps.kept(before, folder_stamps.of_parts(out))
    assert commit.read(LocalStore(out, private=PRIVATE), 1, 0).adopted_by == 2
    assert [row["id"] for row in rows(out)] == list(range(40))
    assert report.output.rows == 40


def test_a_torn_part_without_a_record_is_made_again(spec, engine, out):
    stop(spec, engine(max_num_seqs=4), 5)
    part = out / "part-000001.parquet"
    part.write_bytes(part.read_bytes()[:-30])
    (out / commit.record_name(1, 0)).unlink()
    double, watch = engine(), Watch()

    report = run_job(spec, engine=double, progress=watch)

    assert watch.notes[0] == (
        "part-000001.parquet was not whole and never committed; it is made again"
    )
    assert (report.run.parts_kept, report.run.parts_discarded) == (1, 1)
    assert asked(double) == [*range(8, 16), *range(20, 40)]
    assert "1 parts of earlier runs were not whole and are replaced" in report.warnings
    assert [row["id"] for row in rows(out)] == list(range(40))


def test_two_processes_do_not_write_at_once(spec, engine, out):
    stop(spec, engine(max_num_seqs=4), 3)
    before = folder_stamps.of_parts(out)

    with Attempt(LocalStore(out, private=PRIVATE)) as other:
        double = engine()
        with pytest.raises(OutputConflictError) as caught:
            run_job(spec, engine=double)

    assert caught.value.exit_code == 6
    assert f"another process is writing to {out} (attempt {other.number} on host" in str(
        caught.value
    )
    assert asked(double) == []
    assert folder_stamps.of_parts(out) == before
    assert run_job(spec, engine=double).run.attempt == other.number + 1


def test_the_report_of_a_resumed_job_counts_all_of_it(write_rows, make_spec, engine, out, tmp_path):
    write_rows(
        q=[None if i % 9 == 4 else f"q{i}" for i in range(50)],
        answer=[f"[q{i}]" if i % 2 else "no" for i in range(50)],
        kind=["a", "b"] * 25,
    )
    sections = SMALL | {"eval": {"reference": "answer", "metrics": ["exact_match"], "by": "kind"}}
    spec = make_spec(**sections)
    whole = run_job(
        make_spec(**sections | {"output": {"rows_per_part": 8, "path": str(tmp_path / "whole")}}),
        engine=engine(),
    )

    for num_steps in (2, 3, 1):
        stop(spec, engine(max_num_seqs=4), num_steps)
    report = run_job(spec, engine=engine())

    assert report.errors == whole.errors
    assert report.scores == whole.scores
    assert dataclasses.replace(report.output, path="") == dataclasses.replace(whole.output, path="")
    assert pq.read_table(out).equals(pq.read_table(tmp_path / "whole"))


def test_a_job_on_a_real_engine_is_the_same_with_and_without_stops(
    write_rows, make_spec, out, tmp_path
):
    write_rows(q=[f"text {i}" * (1 + i % 4) for i in range(14)], row_group_size=5)
    model = str(write_tiny_llama(tmp_path / "model", layers=1))

    def spec(path: pathlib.Path, **sizes):
        return make_spec(
            model=model,
            input={"prompt_column": "q"},
            output={"path": str(path), "rows_per_part": 6, "token_ids": True},
            sampling={"max_tokens": 9, "temperature": 0.9},
            engine={"max_model_len": 64, "num_blocks": 64, "max_num_seqs": 4} | sizes,
            seed=5,
        )

    whole = run_job(spec(tmp_path / "whole"))
    other = spec(out, max_num_seqs=2, block_size=8)
    for first, num_steps in ((spec(out), 14), (other, 12)):
        with pytest.raises(JobInterrupted):
            run_job(first, should_stop=StopAfter(num_steps))
    report = run_job(other)

    expected = pq.read_table(tmp_path / "whole")
    assert expected.num_rows == 14
    assert len(set(expected["completion"].to_pylist())) > 10
    assert pq.read_table(out).equals(expected)
    assert report.run.rows + report.run.rows_resumed + 6 * report.run.parts_kept == 14
    assert 0 < report.run.rows < 10
    assert report.output.completion_tokens == whole.output.completion_tokens


def test_a_resumed_job_names_examples_of_failed_rows(write_rows, make_spec, engine, out):
    write_rows(q=pa.array([None] * 9 + ["x"] * 11, pa.string()))
    spec = make_spec(input={"prompt_column": "q"}, output={"rows_per_part": 8}, max_errors=3)
    for _ in range(2):
        with pytest.raises(TooManyRowErrors, match=r"rows.parquet, row group 0, row 0: null_pr"):
            run_job(spec, engine=engine())
