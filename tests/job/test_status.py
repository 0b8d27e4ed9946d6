"""What an output folder says of its job at every stage, without JAX and without being touched."""

import contextlib
import datetime
import fcntl
import io
import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import rich.console

from jaxpaged.errors import OutputConflictError, TooManyRowErrors
from jaxpaged.job.interrupt import JobInterrupted
from jaxpaged.job.look import status_table
from jaxpaged.job.look.status import Status, status
from jaxpaged.job.output.attempt import LEASE_SECONDS
from jaxpaged.job.planned_job import RunOptions
from jaxpaged.job.retry import retry_job
from jaxpaged.job.runner import run_job
from jaxpaged.storage.local_store import LocalStore

NOW = datetime.datetime(2030, 1, 1, 12, tzinfo=datetime.UTC)


def look(out: pathlib.Path, now: datetime.datetime | None = None) -> Status:
    return status(LocalStore(out, private="_jaxpaged"), now)


def shown(found: Status) -> str:
    text = io.StringIO()
    status_table.show(found, rich.console.Console(file=text, width=200))
    return text.getvalue()


def change_json(path: pathlib.Path, **changes: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | changes))


def attempts(out: pathlib.Path) -> pathlib.Path:
    return out / "_jaxpaged" / "attempts"


@contextlib.contextmanager
def held_by_a_writer(out: pathlib.Path):
    with (out / "_jaxpaged" / "lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class Remote(LocalStore):
    """A store that has no locks."""

    def is_locked(self) -> bool | None:
        return None


@pytest.fixture
def job(write_rows, make_spec):
    """Ten rows in parts of four, the sixth without a prompt."""
    write_rows(q=[f"q{i}" if i != 5 else None for i in range(10)])
    return make_spec(input={"prompt_column": "q"}, output={"rows_per_part": 4})


def test_a_folder_where_no_job_ran(tmp_path):
    found = look(tmp_path / "nothing")

    assert found == Status(place=str(tmp_path / "nothing"), state="never ran")
    assert "no job has run here" in shown(found)
    assert not (tmp_path / "nothing").exists()


def test_a_finished_job(job, engine, out):
    run_job(job, engine=engine(answer=lambda text: "yes"))
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}

    found = look(out)

    assert found.state == "finished"
    assert (found.rows, found.rows_committed, found.rows_waiting) == (10, 10, 0)
    assert (found.parts, found.parts_committed, found.bad_records) == (3, 3, 0)
    assert found.finish_reasons == {"stop": 9, "error": 1}
    assert found.errors == {"null_prompt": 1}
    assert found.tokens["prompt"] == 9 * 3
    assert found.tokens["completion"] == 9 * 3
    assert [(a.number, a.state, a.message) for a in found.attempts] == [(1, "finished", "")]
    assert found.attempts[0].pid is not None
    assert found.live is None
    assert found.last_error is None
    assert json.loads(json.dumps(found.to_json()))["last_error"] is None
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_an_interrupted_job_and_its_journal(job, engine, out):
    double = engine(num_steps=lambda request: 1 if request.request_id < 7 else 99)
    calls = iter(range(100))
    with pytest.raises(JobInterrupted):
        run_job(job, engine=double, should_stop=lambda: next(calls) > 3)

    found = look(out)

    assert found.state == "stopped"
    # Of the second part rows 4 and 6; row 5 failed without a prompt, and is none to keep.
    assert (found.rows_committed, found.rows_waiting, found.parts_committed) == (4, 2, 1)
    assert found.live is None
    assert "4 of 10 (40%) in committed parts, 2 more in the journal" in shown(found)


def test_a_journal_of_something_else_does_not_count(job, engine, out):
    double = engine(num_steps=lambda request: 1 if request.request_id < 7 else 99)
    calls = iter(range(100))
    with pytest.raises(JobInterrupted):
        run_job(job, engine=double, should_stop=lambda: next(calls) > 3)
    log = out / "_jaxpaged" / "journal" / "000001"
    whole = log.read_bytes()

    log.write_bytes(whole[:-1])
    assert look(out).rows_waiting == 1
    assert log.read_bytes() == whole[:-1]
    for name in ("000002", "000009", "x"):
        log.with_name(name).write_bytes(whole)
    log.write_bytes(b"")
    assert look(out).rows_waiting == 0
    log.with_name("000000").write_bytes(whole)
    assert look(out).rows_waiting == 0


def test_a_job_with_too_many_errors(job, engine, out, make_spec):
    with pytest.raises(TooManyRowErrors):
        run_job(job.model_copy(update={"max_errors": 0}), engine=engine())

    found = look(out)

    assert found.state == "too many row errors"
    assert found.last_error is not None
    assert found.last_error.message.startswith("1 row errors, more than max_errors allows (0)")
    assert "attempt 1: 1 row errors, more than max_errors" in shown(found)


def test_a_job_that_failed_goes_on_and_finishes(job, engine, out):
    def fail(text: str) -> str:
        raise RuntimeError("the device is gone")

    with pytest.raises(RuntimeError):
        run_job(job, engine=engine(answer=fail))
    assert look(out).state == "failed"
    assert "attempt 1: the device is gone" in shown(look(out))

    run_job(job, engine=engine())

    found = look(out)
    assert found.state == "finished"
    assert [a.state for a in found.attempts] == ["failed", "finished"]
    assert found.to_json()["last_error"] == "the device is gone"


def test_a_killed_job(job, engine, out):
    run_job(job, engine=engine())
    (out / "_SUCCESS").unlink()
    (attempts(out) / "000001.end").unlink()

    found = look(out)

    assert (found.state, found.attempts[0].state) == ("killed", "killed")
    assert "attempt 1 ended without a word" in shown(found)


def test_a_job_that_finished_and_lost_a_part(job, engine, out):
    run_job(job, engine=engine())
    (out / "part-000001.parquet").unlink()
    assert look(out).state == "unfinished"
    for path in attempts(out).iterdir():
        path.unlink()
    assert look(out).state == "unfinished"


def test_a_running_job_is_told_by_the_lock(job, engine, out):
    run_job(job, engine=engine())
    (out / "_SUCCESS").unlink()
    for name in ("000002-r0.json", "000001-r0.json"):
        (out / "_jaxpaged" / "commits" / name).unlink()
    change_json(attempts(out) / "000002.json", host="h", pid=7, began="2030-01-01T11:00:00+00:00")

    with held_by_a_writer(out):
        found = look(out, NOW)
        assert (found.state, found.live) == ("running", None)
        assert [a.state for a in found.attempts] == ["finished", "running"]
        change_json(
            attempts(out) / "000002.beat",
            time="2030-01-01T11:59:50+00:00",
            rows=7,
            total=10,
            errors=1,
            rows_per_second=2.5,
            tokens_per_second=100.0,
            seconds_left=1.2,
        )
        found = look(out, NOW)
    assert found.live is not None
    assert (found.live.rows, found.live.total, found.live.errors) == (7, 10, 1)
    assert (found.live.seconds_silent, found.live.seconds_left) == (10.0, 1.2)
    assert (found.rows_committed, found.rows_waiting) == (4, 3)
    text = shown(found)
    assert "4 of 10 (40%) in committed parts, 3 more finished by the running process" in text
    assert "7/10 rows, 1 errors, ETA 0:00:01" in text
    assert "2.5 rows/s, 100 tokens/s out" in text
    assert "10 s ago" in text

    found = look(out, NOW)
    assert (found.state, found.live) == ("killed", None)


def test_a_writer_that_has_not_said_anything_yet(job, engine, out):
    run_job(job, engine=engine())
    with held_by_a_writer(out):
        found = look(out)
    assert (found.state, found.rows_committed, found.rows_waiting) == ("running", 10, 0)
    assert found.attempts[0].state == "finished"

    empty = out.parent / "empty"
    (empty / "_jaxpaged").mkdir(parents=True)
    with held_by_a_writer(empty):
        assert look(empty).state == "running"
    assert look(empty).state == "never ran"


@pytest.mark.parametrize(
    ("beat", "state"),
    [
        ({"time": "2030-01-01T11:59:30+00:00"}, "running"),
        ({"time": "2030-01-01T13:59:30+02:00"}, "running"),
        ({"time": "2030-01-01T12:59:30+00:00"}, "running"),  # a clock that is ahead
        ({"time": "2030-01-01T11:58:30+00:00"}, "killed"),
        ({"time": "2030-01-01T11:59:30"}, "killed"),
        ({"time": "yesterday"}, "killed"),
        ({"time": 3}, "killed"),
        ({}, "killed"),
    ],
)
def test_without_a_lock_a_fresh_sign_of_life_tells(out, beat, state):
    assert LEASE_SECONDS == 60
    change_json(attempts(out) / "000001.json", began="2030-01-01T01:00:00+00:00", pid=1, host="h")
    change_json(attempts(out) / "000001.beat", **beat)

    found = status(Remote(out, private="_jaxpaged"), NOW)

    assert (found.state, found.attempts[0].state) == (state, state)


def test_without_a_lock_an_attempt_that_just_began_runs(out):
    change_json(attempts(out) / "000001.json", began="2030-01-01T11:59:30+00:00", pid=1, host="h")
    assert status(Remote(out, private="_jaxpaged"), NOW).state == "running"
    change_json(attempts(out) / "000001.end", state="stopped", message="", ended="")
    assert status(Remote(out, private="_jaxpaged"), NOW).state == "stopped"


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b"null", b'{"pid": "x", "rows": "many"}'])
def test_records_of_attempts_that_are_odd_are_no_trouble(job, engine, out, content):
    run_job(job, engine=engine())
    for kind in ("json", "beat", "end"):
        (attempts(out) / f"000002.{kind}").write_bytes(content)

    with held_by_a_writer(out):
        assert look(out).state == "running"
    found = look(out)
    assert found.state == "finished"
    assert [a.number for a in found.attempts] == [1, 2]
    assert "attempt 2" in shown(found)


def test_commit_records_that_cannot_be_read_are_counted(job, engine, out):
    run_job(job, engine=engine())
    (out / "_jaxpaged" / "commits" / "000001-r0.json").write_bytes(b"{")
    (out / "_jaxpaged" / "commits" / "000099-r0.json").write_bytes(b"{")

    found = look(out)

    assert (found.parts_committed, found.rows_committed, found.bad_records) == (3, 10, 1)
    assert found.finish_reasons == {"stop": 6}
    assert "1 cannot be read" in shown(found)


def test_a_broken_history_is_an_error(job, engine, out):
    run_job(job, engine=engine())
    (out / "_jaxpaged" / "job.json").write_text("{")
    with pytest.raises(OutputConflictError, match="is no JSON object"):
        look(out)


def test_an_extended_job_and_its_retry(write_rows, make_spec, engine, out):
    write_rows("a.parquet", q=["a", "long"])
    sections: dict[str, Any] = {
        "input": {"prompt_column": "q"},
        "output": {"rows_per_part": 1},
        "sampling": {"max_tokens": 3},
    }
    run_job(make_spec(**sections), engine=engine(answer=lambda text: text))
    write_rows("b.parquet", q=["b", "longer"])
    double = engine(answer=lambda text: text)
    run_job(make_spec(**sections), engine=double, options=RunOptions(extends=True))
    again: dict[str, Any] = {
        "where": "finish_reason = 'length'",
        "settings": ["sampling.max_tokens=9"],
        "engine": engine(answer=lambda text: text, num_steps=lambda r: 1 + 5 * r.request_id),
    }
    one_is_done = (out / "_jaxpaged" / "commits" / "000001-r2.json").exists
    with pytest.raises(JobInterrupted):
        retry_job(str(out), should_stop=one_is_done, **again)

    found = look(out)

    assert found.state == "retry unfinished"
    assert (found.rows, found.rows_committed) == (4, 4)
    facts = [(r.number, r.kind, r.rows, r.is_finished) for r in found.revisions]
    assert facts == [(1, "extend", 2, True), (2, "retry", 2, False)]
    assert found.finish_reasons == {"stop": 3, "length": 1}
    text = shown(found)
    assert f"`jaxpaged retry {out}` continues it" in text
    assert "where finish_reason = 'length', sampling.max_tokens=9" in text

    retry_job(str(out), **again)
    found = look(out)
    assert (found.state, found.finish_reasons) == ("finished", {"stop": 4})
    assert all(revision.is_finished for revision in found.revisions)


def test_text_of_records_is_shown_without_control_characters(out):
    change_json(attempts(out) / "000001.json", host="h\x1b[2J")
    change_json(attempts(out) / "000001.end", state="failed", message="one\ntwo\x07")
    text = shown(look(out))
    assert "\x1b" not in text
    assert "one two\ufffd" in text


def test_looking_needs_no_jax(job, engine, out):
    run_job(job, engine=engine())
    code = f"""
import pathlib, sys
from jaxpaged.job.look import diff, diff_table, status, status_table, verify, verify_table
from jaxpaged.storage.local_store import LocalStore
store = LocalStore(pathlib.Path({str(out)!r}), private="_jaxpaged")
assert status.status(store).state == "finished"
assert verify.verify(store).problems == ()
assert diff.diff(store, store).is_same
assert not {{"jax", "jaxlib", "flax"}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
