"""Retries that ended early: how they go on, and who waits for them."""

import folder_stamps
import pytest
from job_output import Watch, parts, rows
from retried_job import again, asked, done, finished_job
from stop_after import StopAfter

from jaxpaged.errors import OutputConflictError, TooManyRowErrors
from jaxpaged.job.interrupt import JobInterrupted
from jaxpaged.job.output import commit, history
from jaxpaged.job.planned_job import RunOptions
from jaxpaged.job.retry import retry_job
from jaxpaged.job.runner import run_job
from jaxpaged.job.spec import JobSpec

WHERE = "id < 10"
SETTINGS = ["sampling.max_tokens=9"]


@pytest.fixture
def spec(write_rows, make_spec, engine) -> JobSpec:
    return finished_job(write_rows, make_spec, engine)


@pytest.fixture
def place(spec) -> str:
    return spec.output.path


@pytest.fixture
def stopped(place, engine) -> str:
    """What a retry said that was stopped: five of its ten rows are done, four of them in a part."""
    double = engine(answer=again, max_num_seqs=3, num_steps=lambda r: 1 if r.request_id < 5 else 3)
    with pytest.raises(JobInterrupted) as caught:
        retry_job(place, where=WHERE, settings=SETTINGS, engine=double, should_stop=StopAfter(2))
    return str(caught.value)


@pytest.mark.parametrize("says_it_again", [True, False], ids=["the same command", "bare"])
def test_a_retry_that_was_stopped_goes_on(stopped, place, out, engine, says_it_again):
    assert "stopped after 5 of 10 rows, which are kept in" in stopped
    assert not (out / "_SUCCESS").exists()
    words = {"where": WHERE, "settings": SETTINGS} if says_it_again else {}
    double, watch = engine(answer=again), Watch()
    kept = folder_stamps.of_all(out)["part-000000.parquet"]

    report = done(retry_job(place, engine=double, progress=watch, **words))

    assert asked(double) == [5, 6, 7, 8, 9]
    assert {request.params.max_tokens for request in double.requests} == {9}
    assert watch.begun == (10, 4, 1)
    assert (report.run.rows, report.run.rows_resumed, report.run.parts_kept) == (5, 1, 1)
    assert folder_stamps.of_all(out)["part-000000.parquet"] == kept
    assert [row["completion"].startswith("(") for row in rows(out)] == [True] * 10 + [False] * 10
    assert len(list((out / history.REVISIONS).iterdir())) == 1


@pytest.mark.parametrize(
    ("where", "settings"),
    [
        ("id < 11", ["sampling.max_tokens=9"]),
        ("id < 10", ["seed=1"]),
        ("id < 10", []),
        (None, ["seed=1"]),
    ],
)
def test_another_retry_waits_for_the_one_that_is_not_finished(
    stopped, place, out, engine, where, settings
):
    before = folder_stamps.of_all(out)

    with pytest.raises(OutputConflictError) as caught:
        retry_job(place, where=where, settings=settings, engine=engine())

    assert caught.value.exit_code == 6
    assert "revision 1, another retry, is not finished" in str(caught.value)
    assert '(--where "id < 10" --set sampling.max_tokens=9)' in str(caught.value)
    assert f"finish it first with `jaxpaged retry {place}`" in str(caught.value)
    assert folder_stamps.of_all(out) == before


def test_a_run_waits_for_a_retry_that_is_not_finished(stopped, spec, place, out, engine):
    before = folder_stamps.of_all(out)

    with pytest.raises(OutputConflictError) as caught:
        run_job(spec, engine=engine())

    assert caught.value.exit_code == 6
    assert f"revision 1 of {place} (retry of rows where id < 10) is not finished" in str(
        caught.value
    )
    assert f"jaxpaged retry {place}" in str(caught.value)
    assert folder_stamps.of_all(out) == before
    done(retry_job(place, engine=engine(answer=again)))
    assert run_job(spec).state == "already finished"


def test_a_retry_stopped_over_and_over_asks_for_no_row_twice(place, out, engine):
    finished: list[int] = []
    # The last time only the mark of a finished job is missing.
    while len(finished) < 20:
        double = engine(answer=again, max_num_seqs=2)
        step = double.step

        def noted(step=step) -> list:
            completions = step()
            finished.extend(completion.request_id for completion in completions)
            return completions

        double.step = noted
        with pytest.raises(JobInterrupted):
            retry_job(place, where="id >= 0", engine=double, should_stop=StopAfter(1))
        assert [row["id"] for row in rows(out)] == list(range(20))
    double = engine(answer=again)
    done(retry_job(place, where="id >= 0", engine=double))

    assert finished == list(range(20))
    assert asked(double) == []
    assert all(row["completion"].startswith("(") for row in rows(out))


@pytest.mark.parametrize("where", ["id < 3", None], ids=["the same command", "bare"])
def test_a_retry_of_which_only_the_mark_is_missing_is_marked(place, out, engine, where):
    done(retry_job(place, where="id < 3", engine=engine(answer=again)))
    before = folder_stamps.of_parts(out)
    (out / "_SUCCESS").unlink()
    double = engine()

    with pytest.raises(OutputConflictError, match=r"revision 1, another retry, is not finished"):
        retry_job(place, where="id = 7", engine=double)
    report = done(retry_job(place, where=where, engine=double))

    assert asked(double) == []
    assert (report.output.rows, len(list((out / history.REVISIONS).iterdir()))) == (20, 1)
    assert folder_stamps.of_parts(out) == before
    assert (out / "_SUCCESS").exists()


def test_a_part_of_a_retry_whose_record_was_lost_is_adopted(spec, place, out, engine):
    done(retry_job(place, where="id IN (1, 2, 9)", engine=engine(answer=again)))
    (out / commit.record_name(2, 1)).unlink()
    (out / "_SUCCESS").unlink()
    before = folder_stamps.of_all(out)
    double, watch = engine(), Watch()

    with pytest.raises(OutputConflictError, match="finish it first: jaxpaged retry"):
        run_job(spec, engine=double)
    report = done(retry_job(place, engine=double, progress=watch))

    assert asked(double) == []
    assert watch.notes == ["part-000002.parquet was whole, and is committed now"]
    assert report.run.parts_adopted == 1
    found = folder_stamps.of_all(out)
    assert {name: found[name] for name in parts(out)} == {name: before[name] for name in parts(out)}


def test_a_job_extended_while_a_retry_is_pending_says_what_is_left(
    write_rows, stopped, spec, place, out, engine
):
    write_rows("a.parquet", id=[20, 21], q=["a", "b"])
    watch = Watch()

    report = run_job(spec, engine=engine(), options=RunOptions(extends=True), progress=watch)

    assert report.state == "retry unfinished"
    assert watch.notes[-1] == (
        f"revision 1 (retry of rows where id < 10) is to be finished next: jaxpaged retry {place}"
    )
    assert not (out / "_SUCCESS").exists()
    assert [row["id"] for row in rows(out)] == list(range(22))
    report = done(retry_job(place, engine=engine(answer=again)))
    assert report.output.rows == 22
    assert [row["completion"].startswith("(") for row in rows(out)] == [True] * 10 + [False] * 12
    assert run_job(spec).state == "already finished"


def test_a_retry_that_failed_too_often_goes_on_with_a_higher_limit(
    write_rows, make_spec, engine, out
):
    write_rows(q=[f"q{i}" for i in range(40)])
    spec = make_spec(input={"prompt_column": "q"}, output={"rows_per_part": 4}, max_errors=0)
    run_job(spec, engine=engine())
    with pytest.raises(TooManyRowErrors):
        retry_job(str(out), where="error_code IS NULL", engine=engine(max_model_len=2))

    report = retry_job(
        str(out),
        where="error_code IS NULL",
        settings=["max_errors=40"],
        engine=engine(max_model_len=2),
    )

    assert report is not None
    assert report.num_errors == 40


def test_a_retry_that_changed_no_part_yet_can_be_replaced(spec, place, out, engine):
    """Begun by mistake and stopped at once: another condition is another retry."""
    with pytest.raises(JobInterrupted):
        retry_job(place, where=WHERE, engine=engine(), should_stop=StopAfter(0))
    with pytest.raises(OutputConflictError, match="is not finished"):
        run_job(spec, engine=engine())

    report = done(retry_job(place, where="id = 12", settings=SETTINGS, engine=engine(answer=again)))

    assert report.state == "finished"
    assert [row["id"] for row in rows(out) if row["completion"].startswith("(")] == [12]
    (revision,) = (out / history.REVISIONS).iterdir()
    assert '"where": "id = 12"' in revision.read_text()
    assert (out / "_SUCCESS").exists()
