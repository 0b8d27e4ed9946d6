"""Jobs that end early: what stays, what is visible at every moment, and how they go on."""

import dataclasses
import json
import pathlib
import signal
import subprocess
import sys
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from failing_engine import FailingEngine
from job_output import Watch, parts, rows
from tiny import write_tiny_llama

from jaxpaged.errors import (
    InputSchemaError,
    OutputConflictError,
    TooManyRowErrors,
)
from jaxpaged.job.interrupt import JobInterrupted
from jaxpaged.job.planned_job import RunOptions
from jaxpaged.job.runner import run_job


def test_a_damaged_part_is_refused_until_a_repair(write_rows, make_spec, engine, out):
    write_rows(q=["a", "b", "c"])
    spec = make_spec(input={"prompt_column": "q"}, output={"rows_per_part": 1})
    run_job(spec, engine=engine())
    before = rows(out)
    part = out / "part-000001.parquet"
    part.write_bytes(part.read_bytes()[:300])

    with pytest.raises(OutputConflictError) as caught:
        run_job(spec, engine=engine())
    message = str(caught.value)
    assert "1 committed parts" in message
    assert "are missing or changed: part-000001.parquet; put them back" in message
    assert "`jaxpaged run JOB --repair`" in message
    assert part.stat().st_size == 300

    watch, double = Watch(), engine()
    report = run_job(spec, engine=double, progress=watch, options=RunOptions(repairs=True))

    assert rows(out) == before
    assert watch.notes[0] == "part-000001.parquet does not verify; its rows are made again"
    assert [request.request_id for request in double.requests] == [1]
    assert (report.state, report.run.parts_kept, report.run.rows) == ("finished", 2, 1)
    rejected = out / "_jaxpaged" / "rejected"
    assert [path.stat().st_size for path in rejected.iterdir()] == [300]


def test_too_many_row_errors_fail_the_job_and_keep_its_parts(write_rows, make_spec, engine, out):
    write_rows(q=["a"] * 40 + [None] * 10)
    sections = {"input": {"prompt_column": "q"}, "output": {"rows_per_part": 10}}

    with pytest.raises(TooManyRowErrors) as caught:
        run_job(make_spec(max_errors=3, **sections), engine=engine())

    message = str(caught.value)
    assert "more than max_errors allows (3)" in message
    assert "rows.parquet, row group 0, row 40: null_prompt; " in message
    assert not (out / "_SUCCESS").exists()
    report = json.loads((out / "_jaxpaged" / "report.json").read_text())
    assert report["state"] == "too many row errors"
    assert report["run"]["row_errors"] > 3
    assert "raise max_errors and run the job again" in message
    assert "correct the input and run it with a new output.path" in message
    assert all(row["completion"] == "[a]" for row in rows(out))

    # The limit is no result key: the job goes on behind its parts.
    kept = len(parts(out))
    double = engine()
    with pytest.raises(TooManyRowErrors):
        run_job(make_spec(max_errors="10%", **sections), engine=double)
    report = run_job(make_spec(max_errors="20%", **sections), engine=double)
    assert report.output.finish_reasons == {"stop": 40, "error": 10}
    assert report.num_errors == 10
    assert kept <= report.run.parts_kept <= 4
    assert len(rows(out)) == 50


class StopAfter:
    """Says stop once it was asked so often."""

    def __init__(self, num_steps: int) -> None:
        self.left = num_steps

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


def test_an_interrupted_job_continues_behind_its_parts(
    write_rows, make_spec, engine, tokenizer, out, tmp_path
):
    write_rows(
        id=list(range(64)), q=[f"q{i}" for i in range(64)], answer=[f"[q{i}]" for i in range(64)]
    )
    sections = {
        "input": {"prompt_column": "q"},
        "eval": {"reference": "answer", "metrics": ["exact_match"]},
        "engine": {"max_num_seqs": 4},
    }
    spec = make_spec(output={"rows_per_part": 8}, **sections)
    whole = make_spec(output={"rows_per_part": 8, "path": str(tmp_path / "whole")}, **sections)
    expected = run_job(whole, engine=engine())

    finished: set[int] = set()
    for _ in range(3):
        double = FailingEngine(tokenizer, max_num_seqs=4)
        stamps = {path: path.stat().st_mtime_ns for path in out.glob("*.parquet")}
        with pytest.raises(
            JobInterrupted, match=r"stopped after \d+ of 64 rows, which are kept in"
        ):
            run_job(spec, engine=double, should_stop=StopAfter(5))
        assert not double.has_work()
        assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
        assert [row["id"] for row in rows(out)] == list(range(len(rows(out))))
        assert finished.isdisjoint(double.begun)
        finished |= double.finished
    assert len(parts(out)) >= 3
    assert len(finished) > 8 * len(parts(out)), "some are in the journal alone"
    double = FailingEngine(tokenizer)
    report = run_job(spec, engine=double)

    assert rows(out) == rows(tmp_path / "whole")
    assert report.scores == expected.scores
    assert dataclasses.replace(report.output, path="") == dataclasses.replace(
        expected.output, path=""
    )
    assert double.begun == set(range(64)) - finished
    assert report.run.rows == 64 - len(finished)
    assert report.run.rows_resumed == len(finished) - 8 * report.run.parts_kept


def test_a_stopped_run_reports_what_is_in_the_folder(write_rows, make_spec, engine, out):
    write_rows(q=["a"] * 6000)
    spec = make_spec(
        input={"prompt_column": "q"},
        output={"rows_per_part": 100_000},
        engine={"max_num_seqs": 64},
    )

    with pytest.raises(JobInterrupted, match=r"stopped after 5,120 of 6,000 rows"):
        run_job(spec, engine=engine(max_num_seqs=64), should_stop=StopAfter(80))

    report = json.loads((out / "_jaxpaged" / "report.json").read_text())
    assert report["run"]["rows"] > 4096, "rows were written aside"
    assert (report["state"], report["output"]["parts"], report["output"]["rows"]) == (
        "stopped",
        0,
        0,
    )
    double = engine(max_num_seqs=64)
    assert run_job(spec, engine=double).run.rows_resumed == 5120
    assert len(double.requests) == 880


KILLED = """
import pathlib, sys
sys.path.insert(0, sys.argv.pop())
from scripted_engine import ScriptedEngine
from jaxpaged.job.planned_job import RunOptions
from jaxpaged.job.runner import run_job
from jaxpaged.job.spec import JobSpec
from jaxpaged.model.checkpoint import open_checkpoint

model, source, out = sys.argv[1:]
spec = JobSpec.from_dict({
    "model": model, "input": {"path": source, "prompt_column": "q"},
    "output": {"path": out, "rows_per_part": 16}, "engine": {"max_num_seqs": 4}})
tokenizer = open_checkpoint(pathlib.Path(model)).tokenizer()
run_job(spec, engine=ScriptedEngine(tokenizer, max_num_seqs=4, pause=0.01))
assert not {"jax", "flax"} & set(sys.modules), "the job layer itself needs no JAX"
"""


def test_a_killed_job_never_shows_a_row_twice(write_rows, out, tmp_path):
    model = write_tiny_llama(tmp_path / "model")
    path = write_rows(id=list(range(400)), q=[f"q{i}" for i in range(400)])
    tests = pathlib.Path(__file__).parents[1]
    command = [sys.executable, "-c", KILLED, str(model), str(path), str(out), str(tests)]

    for kill in range(2):
        running = subprocess.Popen(command)
        seen = len(parts(out))
        deadline = time.monotonic() + 60
        while len(parts(out)) < seen + 2 + kill and time.monotonic() < deadline:
            assert running.poll() is None, "the job ended before it was killed"
            time.sleep(0.002)
            if parts(out):
                # At any moment: a table of whole parts.
                assert len(rows(out)) % 16 == 0
        running.send_signal(signal.SIGKILL)
        assert running.wait() == -signal.SIGKILL
        ids = [row["id"] for row in rows(out)]
        assert ids == list(range(len(ids)))
        assert 0 < len(ids) < 400
        assert not (out / "_SUCCESS").exists()
    subprocess.run(command, check=True)

    assert [row["id"] for row in rows(out)] == list(range(400))
    assert (out / "_SUCCESS").exists()
    assert list((out / "_jaxpaged" / "tmp").iterdir()) == []


def test_a_reader_sees_whole_parts_only_at_every_step(write_rows, make_spec, engine, out):
    write_rows(id=list(range(60)), q=["a"] * 60)
    spec = make_spec(input={"prompt_column": "q"}, output={"rows_per_part": 7})
    counts = []

    def look() -> bool:
        visible = [path.name for path in out.iterdir() if path.name[0] not in "_."]
        assert all(name.startswith("part-") for name in visible)
        counts.append(len(rows(out)) if visible else 0)
        return False

    run_job(spec, engine=engine(), should_stop=look)

    assert counts == sorted(counts)
    assert all(count % 7 == 0 or count == 60 for count in counts)
    assert len(set(counts)) > 3


def test_a_broken_input_ends_the_job_and_keeps_its_parts(write_rows, make_spec, engine, out):
    path = write_rows(q=[f"text {i}" for i in range(300)], row_group_size=100)
    start = pq.read_metadata(path).row_group(2).column(0).data_page_offset
    data = bytearray(path.read_bytes())
    data[start : start + 60] = b"\xff" * 60
    path.write_bytes(data)
    spec = make_spec(
        input={"prompt_column": "q"}, output={"rows_per_part": 50}, engine={"max_num_seqs": 4}
    )
    double = engine()

    with pytest.raises(InputSchemaError, match=r"rows.parquet: row group 2 is broken"):
        run_job(spec, engine=double)

    assert not double.has_work()
    assert len(rows(out)) >= 100
    assert not (out / "_SUCCESS").exists()
    report = json.loads((out / "_jaxpaged" / "report.json").read_text())
    assert report["state"] == "failed"
    assert report["output"]["rows"] == len(rows(out))


def test_a_part_that_cannot_be_read_is_never_deleted(write_rows, make_spec, engine, out):
    write_rows(q=["a", "b"])
    spec = make_spec(input={"prompt_column": "q"}, output={"rows_per_part": 1})
    run_job(spec, engine=engine())
    (out / "_SUCCESS").unlink()
    part = out / "part-000001.parquet"
    part.unlink()
    part.symlink_to(part)

    with pytest.raises(OutputConflictError, match=r"missing or changed: part-000001.parquet"):
        run_job(spec, engine=engine())
    assert part.is_symlink()


def test_a_job_that_failed_stays_failed(write_rows, make_spec, engine, out):
    write_rows(q=pa.array([None] * 4, pa.string()))
    spec = make_spec(input={"prompt_column": "q"}, max_errors=0)
    for _ in range(2):
        with pytest.raises(TooManyRowErrors):
            run_job(spec, engine=engine())
    assert not (out / "_SUCCESS").exists()
