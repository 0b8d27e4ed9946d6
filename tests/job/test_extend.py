import json
import pathlib

import folder_stamps
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from job_output import Watch, parts, rows
from stop_after import StopAfter

from jaxpaged.errors import IdentityError
from jaxpaged.job.interrupt import JobInterrupted
from jaxpaged.job.output import history, output_view
from jaxpaged.job.planned_job import RunOptions
from jaxpaged.job.runner import run_job

EXTENDS = RunOptions(extends=True)
SMALL = {
    "input": {"prompt_column": "q"},
    "output": {"rows_per_part": 4},
    "engine": {"max_num_seqs": 2},
}


def records(out: pathlib.Path) -> folder_stamps.Stamps:
    """Of the parts and of what says how they came."""
    found = folder_stamps.of_all(out)
    changing = ("_SUCCESS", output_view.REPORT, output_view.PAGE)
    return {name: stamp for name, stamp in found.items() if name not in changing}


def asked(double) -> list[int]:
    return [request.request_id for request in double.requests]


@pytest.fixture
def write(write_rows):
    """Writes a file whose rows say which one they are of."""

    def write_file(name: str, num_rows: int) -> pathlib.Path:
        texts = pa.array([f"{name[0]}{i}" for i in range(num_rows)], pa.string())
        return write_rows(name, q=texts, row_group_size=3)

    return write_file


@pytest.fixture
def spec(write, make_spec, engine):
    """A finished job of six rows."""
    write("m.parquet", 6)
    spec = make_spec(**SMALL)
    run_job(spec, engine=engine())
    return spec


def texts(out: pathlib.Path) -> list[str]:
    return [row["q"] for row in rows(out)]


OLD = [f"m{i}" for i in range(6)]
NEW = [f"a{i}" for i in range(5)]


def test_rows_of_new_files_come_behind_the_old_ones_which_stay(write, spec, engine, out):
    before = records(out)
    # It would sort in front.
    write("a.parquet", 5)
    double, watch = engine(), Watch()

    report = run_job(spec, engine=double, options=EXTENDS, progress=watch)

    assert texts(out) == OLD + NEW
    assert [row["completion"] for row in rows(out)] == [f"[{text}]" for text in OLD + NEW]
    assert [row["row"]["file"] for row in rows(out)] == ["m.parquet"] * 6 + ["a.parquet"] * 5
    assert [pq.read_metadata(out / name).num_rows for name in parts(out)] == [4, 2, 4, 1]
    assert asked(double) == [6, 7, 8, 9, 10]
    assert watch.begun == (11, 6, 0)
    assert folder_stamps.kept(before, records(out))
    assert (report.state, report.input_rows, report.output.rows) == ("finished", 11, 11)
    assert (report.run.revision, report.run.parts_kept, report.run.rows) == (1, 2, 5)
    summary = json.loads((out / "_SUCCESS").read_text())
    assert (summary["rows"], summary["parts"], summary["revision"]) == (11, 4, 1)


def test_a_row_s_random_numbers_are_those_of_a_job_that_began_with_it(write, spec, engine):
    write("a.parquet", 5)
    double, fresh = engine(), engine()
    run_job(spec, engine=double, options=EXTENDS)

    output = spec.output.model_copy(update={"path": spec.output.path + "-fresh"})
    run_job(spec.model_copy(update={"output": output}), engine=fresh)

    # The file comes first there.
    assert [r.request_id for r in fresh.requests[:5]] == [0, 1, 2, 3, 4]
    assert [r.address for r in fresh.requests[:5]] == [r.address for r in double.requests]


def test_a_new_file_is_refused_until_it_is_wanted(write, spec, engine, out):
    write("a.parquet", 5)
    before = records(out)

    with pytest.raises(IdentityError) as caught:
        run_job(spec, engine=engine())

    assert caught.value.exit_code == 3
    assert "input file a.parquet: is new, 5 rows" in str(caught.value)
    assert "; `jaxpaged run JOB --extend` takes new input files in" in str(caught.value)
    assert records(out) == before
    assert (out / "_SUCCESS").exists()


@pytest.mark.parametrize("grows", [True, False], ids=["and a new one", "alone"])
def test_a_file_that_is_gone_or_changed_is_refused_all_the_same(write, spec, engine, out, grows):
    old = write("m.parquet", 6)
    kept = old.read_bytes()
    if grows:
        write("a.parquet", 5)
    before = records(out)

    old.unlink()
    if grows:
        with pytest.raises(IdentityError, match=r"m.parquet: 6 rows -> is gone; put it back"):
            run_job(spec, engine=engine(), options=EXTENDS)
    write("m.parquet", 7)
    with pytest.raises(IdentityError, match=r"m.parquet: rows 6 -> 7"):
        run_job(spec, engine=engine(), options=EXTENDS)
    assert records(out) == before

    old.write_bytes(kept)
    assert run_job(spec, engine=engine(), options=EXTENDS).output.rows == (11 if grows else 6)


def test_a_changed_result_key_is_refused_all_the_same(write, spec, make_spec, engine):
    write("a.parquet", 5)

    with pytest.raises(IdentityError, match="seed: 0 -> 1"):
        run_job(make_spec(seed=1, **SMALL), engine=engine(), options=EXTENDS)


def test_a_job_can_be_extended_again_and_again(write, spec, engine, out):
    for name, num_rows in (("a.parquet", 5), ("z.parquet", 3), ("b.parquet", 4)):
        before = records(out)
        write(name, num_rows)
        assert run_job(spec, engine=engine(), options=EXTENDS).state == "finished"
        assert folder_stamps.kept(before, records(out))

    later = [f"z{i}" for i in range(3)] + [f"b{i}" for i in range(4)]
    assert texts(out) == OLD + NEW + later
    names = sorted(path.name for path in (out / history.REVISIONS).iterdir())
    assert names == ["000001.json", "000002.json", "000003.json"]


def test_several_files_at_once_are_one_revision(write, spec, engine, out):
    write("z.parquet", 1)
    write("a.parquet", 5)

    run_job(spec, engine=engine(), options=EXTENDS)

    assert texts(out) == [*OLD, *NEW, "z0"]
    assert len(list((out / history.REVISIONS).iterdir())) == 1
    assert [pq.read_metadata(out / name).num_rows for name in parts(out)] == [4, 2, 4, 2]


def test_an_extended_job_needs_no_flag_once_it_is_one(write, spec, engine):
    write("a.parquet", 5)
    run_job(spec, engine=engine(), options=EXTENDS)

    assert run_job(spec).state == "already finished"
    assert run_job(spec, options=EXTENDS).state == "already finished"


def test_without_new_files_the_flag_changes_nothing(spec, out):
    before = records(out)

    assert run_job(spec, options=EXTENDS).state == "already finished"
    assert records(out) == before


def test_an_extension_that_was_stopped_continues_without_the_flag(write, spec, engine, out):
    write("a.parquet", 9)
    with pytest.raises(JobInterrupted):
        run_job(spec, engine=engine(max_num_seqs=2), options=EXTENDS, should_stop=StopAfter(3))
    assert not (out / "_SUCCESS").exists()
    assert texts(out) == [*OLD, *(f"a{i}" for i in range(4))]
    double = engine()

    report = run_job(spec, engine=double)

    assert asked(double) == [12, 13, 14]
    assert (report.run.rows_resumed, report.output.rows) == (2, 15)
    assert texts(out) == [*OLD, *(f"a{i}" for i in range(9))]


def test_a_job_that_is_not_finished_can_be_extended(write, make_spec, engine, out):
    write("m.parquet", 6)
    spec = make_spec(**SMALL)
    with pytest.raises(JobInterrupted):
        run_job(spec, engine=engine(max_num_seqs=2), should_stop=StopAfter(1))
    write("a.parquet", 5)
    double = engine()

    run_job(spec, engine=double, options=EXTENDS)

    assert asked(double) == [*range(2, 11)]
    assert texts(out) == OLD + NEW


def test_a_job_without_rows_can_be_extended(write, make_spec, engine, out):
    write("m.parquet", 0)
    spec = make_spec(**SMALL)
    run_job(spec, engine=engine())
    before = records(out)
    write("a.parquet", 5)

    report = run_job(spec, engine=engine(), options=EXTENDS)

    assert texts(out) == NEW
    assert [pq.read_metadata(out / name).num_rows for name in parts(out)] == [0, 4, 1]
    assert folder_stamps.kept(before, records(out))
    assert (report.input_rows, report.warnings) == (5, ())


def test_a_file_without_rows_is_taken_in_too(write, spec, engine, out):
    write("a.parquet", 0)
    double = engine()

    report = run_job(spec, engine=double, options=EXTENDS)

    assert (report.state, report.run.revision, asked(double)) == ("finished", 1, [])
    assert len(parts(out)) == 2
    assert run_job(spec).state == "already finished"
    write("b.parquet", 3)
    run_job(spec, engine=double, options=EXTENDS)
    assert texts(out) == [*OLD, "b0", "b1", "b2"]


def test_files_that_come_from_another_folder_keep_the_old_names(
    write, spec, make_spec, engine, out, tmp_path
):
    before = records(out)
    more = tmp_path / "more" / "x.parquet"
    more.parent.mkdir()
    pq.write_table(pa.table({"q": ["x0", "x1"]}), more)
    paths = [str(tmp_path / "in"), str(tmp_path / "more")]
    wider = make_spec(input={"prompt_column": "q", "path": paths}, output=SMALL["output"])

    with pytest.raises(IdentityError, match=r"input file \.\./more/x.parquet: is new, 2 rows"):
        run_job(wider, engine=engine())
    run_job(wider, engine=engine(), options=EXTENDS)

    assert texts(out) == [*OLD, "x0", "x1"]
    assert folder_stamps.kept(before, records(out))
    assert run_job(wider).state == "already finished"


def test_an_extension_of_which_nothing_is_committed_can_be_taken_back(write, spec, engine, out):
    before = records(out)
    added = write("z.parquet", 5)
    with pytest.raises(JobInterrupted):
        run_job(spec, engine=engine(), options=EXTENDS, should_stop=StopAfter(0))
    assert len(list((out / history.REVISIONS).iterdir())) == 1
    added.unlink()

    report = run_job(spec, engine=engine())

    assert report.state == "finished"
    assert texts(out) == OLD
    assert list((out / history.REVISIONS).iterdir()) == []
    assert {name: stamp for name, stamp in records(out).items() if name in before} == before


def test_an_extension_with_a_committed_part_stays(write, spec, engine, out):
    added = write("z.parquet", 8)
    with pytest.raises(JobInterrupted):
        run_job(spec, engine=engine(max_num_seqs=2), options=EXTENDS, should_stop=StopAfter(3))
    assert len(parts(out)) == 3
    added.unlink()

    with pytest.raises(IdentityError, match=r"z.parquet: 8 rows -> is gone"):
        run_job(spec, engine=engine())
