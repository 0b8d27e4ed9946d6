"""`jaxpaged report OUT`: the report made again from what lies in a folder."""

import dataclasses
import json
import pathlib

import pytest

from jaxpaged.errors import OutputConflictError, StorageError
from jaxpaged.job import rebuilt_report
from jaxpaged.job.interrupt import JobInterrupted
from jaxpaged.job.runner import run_job
from jaxpaged.storage.local_store import LocalStore


def store(out: pathlib.Path) -> LocalStore:
    return LocalStore(out, private="_jaxpaged")


@pytest.fixture
def spec(write_rows, make_spec):
    write_rows(q=[f"question {number}" for number in range(10)], answer=["x"] * 10)
    return make_spec(
        input={"prompt": "{{ q }}?"},
        output={"rows_per_part": 4},
        eval={"reference": "answer", "metrics": ["contains"]},
    )


def comparable(report):
    """All of a report but the moment it was written."""
    return dataclasses.replace(report, written="")


def test_it_is_the_report_of_the_run(spec, engine, out):
    told = run_job(spec, engine=engine())
    (out.parent / "in").rename(out.parent / "elsewhere")

    found = rebuilt_report.write(store(out))

    samples = tuple(
        dataclasses.replace(sample, preview=f"question {row}")
        for row, sample in enumerate(told.samples)
    )
    assert comparable(found) == comparable(dataclasses.replace(told, samples=samples))
    page = (out / "_jaxpaged" / "report.html").read_text()
    assert "question 1" in page
    assert "[question 1?]" in page


def test_what_was_counted_is_counted_again_and_what_the_run_knew_is_kept(spec, engine, out):
    told = run_job(spec, engine=engine())
    path = out / "_jaxpaged" / "report.json"
    values = json.loads(path.read_text())
    values["output"]["rows"] = values["input_rows"] = 77
    values["scores"] = []
    values["run"]["seconds"] = 1234.5
    values["versions"] = {"jaxpaged": "0.0.1"}
    values["job"]["engine"]["max_num_seqs"] = 3
    path.write_text(json.dumps(values))

    found = rebuilt_report.write(store(out))

    assert (found.input_rows, found.output, found.scores) == (10, told.output, told.scores)
    assert (found.run.seconds, found.versions) == (1234.5, {"jaxpaged": "0.0.1"})
    assert found.job["engine"]["max_num_seqs"] == 3
    assert json.loads(path.read_text())["run"]["seconds"] == 1234.5


def test_without_any_report_the_folder_still_tells_most(spec, engine, out):
    told = run_job(spec, engine=engine())
    (out / "_jaxpaged" / "report.json").unlink()

    found = rebuilt_report.rebuild(store(out))

    assert (found.state, found.output, found.scores) == ("finished", told.output, told.scores)
    assert found.run.seconds == 0
    assert "no report of a run is there" in found.notes[-1]
    assert not (out / "_jaxpaged" / "report.json").exists()


def test_a_stopped_and_a_killed_run(spec, engine, out):
    calls = iter(range(100))
    double = engine(num_steps=lambda request: 1 if request.request_id < 4 else 99)
    with pytest.raises(JobInterrupted):
        run_job(spec, engine=double, should_stop=lambda: next(calls) > 2)
    found = rebuilt_report.rebuild(store(out))
    assert (found.state, found.output.rows) == ("stopped", 4)
    assert found.message.startswith("stopped after 4 of 10 rows")

    attempts = out / "_jaxpaged" / "attempts"
    attempts.joinpath("000002.json").write_bytes(attempts.joinpath("000001.json").read_bytes())
    found = rebuilt_report.rebuild(store(out))

    assert (found.state, found.message) == ("killed", "")
    assert found.notes[-1] == ("attempt 2 left no report: what is said of a run is about attempt 1")


def test_samples_stay_out_where_a_job_says_so(spec, engine, out):
    hidden = spec.output.model_copy(update={"report_samples": False})
    run_job(spec.model_copy(update={"output": hidden}), engine=engine())

    assert rebuilt_report.write(store(out)).samples == ()
    assert "question" not in (out / "_jaxpaged" / "report.html").read_text()

    # The job began with them, its last run went without.
    for name in ("job.json", "report.json"):
        path = out / "_jaxpaged" / name
        text = path.read_text()
        assert '"report_samples": false' in text or name == "job.json"
        if name == "job.json":
            path.write_text(text.replace('report_samples": false', 'report_samples": true'))
    assert rebuilt_report.rebuild(store(out)).samples == ()


@pytest.mark.parametrize("explode", [False, True])
def test_samples_of_rows_with_several_completions(write_rows, make_spec, engine, out, explode):
    write_rows(q=["a", None, "c"])
    spec = make_spec(
        input={"prompt_column": "q"},
        output={"explode": explode, "prompt": True},
        sampling={"n": 2, "temperature": 1.0},
    )
    told = run_job(spec, engine=engine())
    assert rebuilt_report.rebuild(store(out)).samples == told.samples


def test_a_part_that_cannot_be_read_has_no_samples(spec, engine, out):
    run_job(spec, engine=engine())
    (out / "part-000000.parquet").write_bytes(b"PAR1")
    found = rebuilt_report.rebuild(store(out))
    assert found.samples == ()
    assert found.output.rows == 10


def test_a_running_job_writes_its_own(spec, engine, out):
    run_job(spec, engine=engine())
    writer = store(out)
    assert writer.lock()
    try:
        with pytest.raises(OutputConflictError, match=r"a job is running there.*jaxpaged status"):
            rebuilt_report.write(store(out))
    finally:
        writer.unlock()


def test_a_folder_of_nothing(out):
    out.mkdir()
    with pytest.raises(OutputConflictError, match="no output of jaxpaged's"):
        rebuilt_report.write(store(out))


def test_a_page_elsewhere_leaves_the_folder_alone(spec, engine, out, tmp_path):
    run_job(spec, engine=engine())
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}

    rebuilt_report.write_page(store(out), tmp_path / "page.html")

    assert "question 1" in (tmp_path / "page.html").read_text()
    assert before == {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    with pytest.raises(StorageError, match=r"page\.html: cannot be written: .*; name another"):
        rebuilt_report.write_page(store(out), tmp_path / "no" / "page.html")


def test_records_of_before_there_were_lengths(spec, engine, out):
    told = run_job(spec, engine=engine())
    for path in (out / "_jaxpaged" / "commits").iterdir():
        record = json.loads(path.read_text())
        assert sum(record["counts"].pop("prompt_lengths").values()) in (2, 4)
        assert record["counts"].pop("completion_lengths")
        path.write_text(json.dumps(record))

    found = rebuilt_report.write(store(out))

    assert (found.output.prompt_lengths, found.output.completion_lengths) == ({}, {})
    assert found.output.rows == told.output.rows
    assert run_job(spec, engine=engine()).state == "already finished"
