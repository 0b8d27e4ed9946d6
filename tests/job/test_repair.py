import folder_stamps
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from job_output import Watch, parts, rows
from stop_after import StopAfter

from jaxpaged.errors import OutputConflictError
from jaxpaged.job.interrupt import JobInterrupted
from jaxpaged.job.output import commit
from jaxpaged.job.output.output_view import REJECTED
from jaxpaged.job.planned_job import RunOptions
from jaxpaged.job.runner import run_job

REPAIRS = RunOptions(repairs=True)


def asked(double) -> list[int]:
    return [request.request_id for request in double.requests]


@pytest.fixture
def spec(write_rows, make_spec):
    """Of forty rows in five parts."""
    write_rows(id=list(range(40)), q=[f"q{i}" for i in range(40)], row_group_size=11)
    return make_spec(
        input={"prompt_column": "q"}, output={"rows_per_part": 8}, engine={"max_num_seqs": 4}
    )


def stop(spec, double, num_steps: int, **options) -> None:
    with pytest.raises(JobInterrupted):
        run_job(spec, engine=double, should_stop=StopAfter(num_steps), **options)


@pytest.fixture
def damaged(spec, engine, out):
    """A finished job of which one part is gone, one was cut, and one has a flipped byte."""
    run_job(spec, engine=engine())
    (out / "part-000000.parquet").unlink()
    for name, change in (("part-000002.parquet", -1), ("part-000003.parquet", 0)):
        data = bytearray((out / name).read_bytes())
        data[pq.read_metadata(out / name).row_group(0).column(0).data_page_offset + 40] ^= 0xFF
        (out / name).write_bytes(data[: len(data) + change])
    return spec


def test_committed_parts_that_are_missing_or_changed_are_refused(damaged, engine, out):
    double = engine()

    with pytest.raises(OutputConflictError) as caught:
        run_job(damaged, engine=double)

    assert caught.value.exit_code == 6
    assert "2 committed parts" in str(caught.value)
    assert "part-000000.parquet, part-000002.parquet; put them back" in str(caught.value)
    assert "`jaxpaged run JOB --repair`" in str(caught.value)
    assert asked(double) == []
    assert parts(out) == [f"part-{n:06d}.parquet" for n in (1, 2, 3, 4)]


def test_a_repair_makes_just_the_rejected_parts_again(damaged, engine, out):
    before = folder_stamps.of_parts(out)
    double, watch = engine(), Watch()

    report = run_job(damaged, engine=double, progress=watch, options=REPAIRS)

    assert watch.notes[:3] == [
        f"part-{n:06d}.parquet does not verify; its rows are made again" for n in (0, 2, 3)
    ]
    assert asked(double) == [*range(8), *range(16, 32)]
    found = folder_stamps.of_parts(out)
    for name in ("part-000001.parquet", "part-000004.parquet"):
        assert found[name] == before[name]
    kept = {path.name: path.read_bytes() for path in (out / REJECTED).iterdir()}
    assert kept == {
        "part-000002.parquet.a2": before["part-000002.parquet"][0],
        "part-000003.parquet.a2": before["part-000003.parquet"][0],
    }
    assert report.state == "finished"
    assert [row["completion"] for row in rows(out)] == [f"[q{i}]" for i in range(40)]
    assert run_job(damaged).state == "already finished"
    assert run_job(damaged, options=REPAIRS).run.rows == 0
    assert folder_stamps.of_parts(out) == found


def test_a_record_that_makes_no_sense_is_refused_and_repaired(spec, engine, out):
    stop(spec, engine(max_num_seqs=4), 5)
    before = folder_stamps.of_parts(out)
    (out / commit.record_name(1, 0)).write_text("{")

    with pytest.raises(OutputConflictError, match=r"000001-r0.json is no commit record any more"):
        run_job(spec, engine=engine())
    double = engine()
    report = run_job(spec, engine=double, options=REPAIRS)

    assert asked(double) == [*range(8, 16), *range(20, 40)]
    assert report.output.rows == 40
    assert folder_stamps.of_parts(out)["part-000000.parquet"] == before["part-000000.parquet"]
    assert [row["id"] for row in rows(out)] == list(range(40))


def test_a_foreign_part_in_a_committed_one_s_place_is_kept_aside_by_a_repair(spec, engine, out):
    run_job(spec, engine=engine())
    expected = rows(out)
    pq.write_table(pa.table({"x": [1]}), out / "part-000001.parquet")
    foreign = (out / "part-000001.parquet").read_bytes()

    run_job(spec, engine=engine(), options=REPAIRS)

    assert rows(out) == expected
    assert (out / REJECTED / "part-000001.parquet.a2").read_bytes() == foreign


def test_a_repair_that_was_stopped_is_finished_by_an_ordinary_run(damaged, engine, out):
    stop(damaged, engine(max_num_seqs=4), 3, options=REPAIRS)
    assert parts(out) == [f"part-{n:06d}.parquet" for n in (0, 1, 4)]

    report = run_job(damaged, engine=engine())

    assert report.state == "finished"
    assert [row["completion"] for row in rows(out)] == [f"[q{i}]" for i in range(40)]
