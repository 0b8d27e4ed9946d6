import json
import pathlib
import shutil
import struct

import folder_stamps
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from job_output import Watch, rows
from retried_job import SMALL, again, asked, done, finished_job
from stop_after import NEVER, StopAfter

from jaxpaged.errors import ConfigError, IdentityError, JaxPagedError, OutputConflictError
from jaxpaged.job.interrupt import JobInterrupted
from jaxpaged.job.output import commit, history, output_view
from jaxpaged.job.output.attempt import Attempt
from jaxpaged.job.output.history import Revision
from jaxpaged.job.output.output_view import PRIVATE
from jaxpaged.job.planned_job import RunOptions
from jaxpaged.job.retry import retry_job
from jaxpaged.job.runner import run_job
from jaxpaged.job.spec import JobSpec
from jaxpaged.storage.local_store import LocalStore

CUT = "finish_reason = 'length'"
LONGER = ["sampling.max_tokens=20"]


def revisions(out: pathlib.Path) -> tuple[Revision, ...]:
    known = history.read(LocalStore(out, private=PRIVATE))
    assert known is not None
    return known.revisions


@pytest.fixture
def spec(write_rows, make_spec, engine) -> JobSpec:
    return finished_job(write_rows, make_spec, engine)


@pytest.fixture
def place(spec) -> str:
    return spec.output.path


def test_rows_that_were_cut_are_completed_with_a_higher_limit(write_rows, make_spec, engine, out):
    write_rows(id=[0, 1, 2, 3], q=["a", "long b", "c", "long d"])
    run_job(make_spec(input={"prompt_column": "q"}, sampling={"max_tokens": 4}), engine=engine())
    before = rows(out)
    assert [row["finish_reason"] for row in before] == ["stop", "length", "stop", "length"]
    double = engine()

    report = done(retry_job(str(out), where=CUT, settings=["sampling.max_tokens=8"], engine=double))

    after = rows(out)
    assert [after[0], after[2]] == [before[0], before[2]]
    assert [after[1]["completion"], after[3]["completion"]] == ["[long b]", "[long d]"]
    assert {row["finish_reason"] for row in after} == {"stop"}
    assert asked(double) == [1, 3]
    assert [request.params.max_tokens for request in double.requests] == [8, 8]
    assert report.output.finish_reasons == {"stop": 4}
    assert (report.run.rows, report.run.revision) == (2, 1)
    assert json.loads((out / "_SUCCESS").read_text())["revision"] == 1


def rich_columns(num_rows: int) -> dict[str, pa.Array]:
    """Columns of every shape, with nulls; NaNs are of two kinds."""
    odd_nan = struct.unpack("d", struct.pack("Q", 0x7FF8_0000_DEAD_BEEF))[0]
    numbers = range(num_rows)
    return {
        "id": pa.array(numbers),
        "q": pa.array([f"q{i}" for i in numbers]),
        "answer": pa.array([f"[q{i}]" if i % 2 else None for i in numbers]),
        "kind": pa.array([["x", "y", None][i % 3] for i in numbers]).dictionary_encode(),
        "tags": pa.array([[i, None] if i % 4 else None for i in numbers], pa.list_(pa.int16())),
        "nested": pa.array([{"a": {"b": f"ü{i}"}, "c": [i]} if i % 5 else None for i in numbers]),
        "moment": pa.array([i * 10**15 + 1 for i in numbers], pa.timestamp("ns", "Asia/Tokyo")),
        "float": pa.array([[float("nan"), odd_nan, -0.0, i / 3][i % 4] for i in numbers]),
        "blob": pa.array([bytes([i, 0, 255]) for i in numbers]),
        "pairs": pa.array([[("k", i)] for i in numbers], pa.map_(pa.string(), pa.int64())),
        "none": pa.nulls(num_rows),
    }


def bits(table: pa.Table) -> pa.Table:
    """The table with floats as what they are made of, so that NaNs can be compared."""
    numbers = table["float"].to_numpy().view(np.uint64)
    return table.set_column(table.schema.get_field_index("float"), "float", [pa.array(numbers)])


def test_all_other_rows_stay_bit_for_bit(write_rows, make_spec, engine, out):
    write_rows(**rich_columns(23), row_group_size=7)
    spec = make_spec(
        input={"prompt_column": "q"},
        output={"rows_per_part": 8, "token_ids": True, "prompt": True},
        eval={"reference": "answer", "metrics": ["exact_match"], "by": "kind"},
    )
    run_job(spec, engine=engine())
    before, old_parts = pq.read_table(out), folder_stamps.of_all(out)

    done(retry_job(str(out), where="id IN (0, 3, 7, 9)", engine=engine(answer=again)))

    after = pq.read_table(out)
    kept = [i for i in range(23) if i not in (0, 3, 7, 9)]
    assert after.schema.equals(before.schema, check_metadata=False)
    assert bits(after.take(kept)).equals(bits(before.take(kept)))
    assert after["completion"].take([0, 3, 7, 9]).to_pylist() == ["(q0)", "(q3)", "(q7)", "(q9)"]
    # Carried cells of the redone rows are those of the input, not of another row.
    carried = list(rich_columns(1))
    assert bits(after.select(carried)).equals(bits(before.select(carried)))
    kept_part = pq.read_table(out / output_view.SUPERSEDED / "part-000000.parquet.r0")
    assert bits(kept_part).equals(bits(before.slice(0, 8)))
    found = folder_stamps.of_all(out)
    assert found["part-000002.parquet"] == old_parts["part-000002.parquet"]
    assert (
        found[f"{output_view.SUPERSEDED}/part-000001.parquet.r0"][0]
        == (old_parts["part-000001.parquet"][0])
    )
    assert after["score_exact_match"].take([3]).to_pylist() == [False]
    assert before["score_exact_match"].take([3]).to_pylist() == [True]


def test_failed_rows_can_be_redone(write_rows, make_spec, engine, out):
    write_rows(id=list(range(6)), q=["a", None, "x" * 40, "b", "x" * 50, None])
    run_job(make_spec(**SMALL), engine=engine(max_model_len=32))
    before = rows(out)

    report = done(retry_job(str(out), where="error_code = 'prompt_too_long'", engine=engine()))

    after = rows(out)
    assert [row["error_code"] for row in after] == [None, "null_prompt", *[None] * 3, "null_prompt"]
    assert after[2]["completion"] == f"[{'x' * 40}]"
    assert [after[i] for i in (0, 1, 3, 5)] == [before[i] for i in (0, 1, 3, 5)]
    assert {error.code: error.count for error in report.errors} == {"null_prompt": 2}
    assert report.num_errors == 2


@pytest.mark.parametrize(
    "setting",
    [
        "model=/other",
        "input.prompt_column=id",
        "input.columns=[id]",
        "input.allow_special_tokens=true",
        "output.path=/other",
        "output.rows_per_part=5",
        "output.token_ids=true",
        "engine.dtype=bfloat16",
        "sampling.columns.max_tokens=id",
        "sampling.columns={seed: id}",
        "eval.reference=q",
        "storage.s3.region=x",
        "sampling={max_tokens: 5}",
    ],
)
def test_a_setting_that_rows_side_by_side_share_cannot_change(place, out, engine, setting):
    before = folder_stamps.of_all(out)

    with pytest.raises(ConfigError) as caught:
        retry_job(place, where=CUT, settings=[setting], engine=engine())

    assert caught.value.exit_code == 2
    assert f"--set {setting.partition('=')[0]}: cannot change in a retry" in str(caught.value)
    assert "what can: sampling, engine.max_model_len, seed, " in str(caught.value)
    assert folder_stamps.of_all(out) == before


@pytest.mark.parametrize(
    ("where", "settings", "message"),
    [
        (None, [], r"--where: is missing; say which rows to redo"),
        (None, LONGER, r"--where: is missing; say which rows to redo"),
        ("finish_reson = 'length'", [], r"did you mean 'finish_reason'\?"),
        ("id = 'x'", [], r"does not fit column"),
        ("id = ", [], r"--where"),
        (CUT, ["sampling.max_tokens=0"], r"sampling.max_tokens: must be at least 1"),
        (CUT, ["sampling.max_token=5"], r"did you mean max_tokens\?"),
        (CUT, ["sampling.max_tokens"], r"--set sampling.max_tokens: expected key=value"),
        (CUT, ["seed.x=5"], r"--set seed.x: seed has no keys inside"),
        (CUT, ["engine.max_model_len=1000"], r"engine.max_model_len is 1000, .* at most 256"),
    ],
)
def test_a_wrong_condition_or_setting_changes_nothing(place, out, where, settings, message):
    before = folder_stamps.of_all(out)

    with pytest.raises(ConfigError, match=message):
        retry_job(place, where=where, settings=settings)
    assert folder_stamps.of_all(out) == before


def test_a_folder_without_a_finished_job_is_refused(write_rows, make_spec, engine, out, tmp_path):
    write_rows(q=[f"q{i}" for i in range(12)])
    spec = make_spec(**SMALL)
    for place in (out, tmp_path / "in", tmp_path):
        with pytest.raises(OutputConflictError) as caught:
            retry_job(str(place), where=CUT, engine=engine())
        assert caught.value.exit_code == 6
    assert not out.exists()

    with pytest.raises(JobInterrupted):
        run_job(spec, engine=engine(max_num_seqs=2), should_stop=StopAfter(3))
    before = folder_stamps.of_all(out)
    with pytest.raises(OutputConflictError, match=r"is not finished, .* `jaxpaged run`") as caught:
        retry_job(str(out), where=CUT, engine=engine())
    assert caught.value.exit_code == 6
    assert folder_stamps.of_all(out) == before


def test_if_no_row_is_chosen_nothing_happens(place, out):
    before = folder_stamps.of_all(out)
    attempts = len(list((out / PRIVATE / "attempts").iterdir()))

    assert retry_job(place, where="id > 1000") is None

    assert folder_stamps.of_all(out) == before
    assert revisions(out) == ()
    assert len(list((out / PRIVATE / "attempts").iterdir())) == attempts


def test_a_revision_says_what_was_redone_and_of_what(place, out, engine):
    job = (out / history.JOB).read_bytes()
    known = history.read(LocalStore(out, private=PRIVATE))
    assert known is not None

    done(
        retry_job(
            place,
            where="id IN (4, 5, 17)",
            settings=["sampling.stop=[x]", "seed=3"],
            engine=engine(),
        )
    )

    [revision] = revisions(out)
    assert (revision.number, revision.kind) == (1, "retry")
    assert revision.parent == known.fingerprint
    assert revision.where == "id IN (4, 5, 17)"
    assert revision.settings == {"sampling.stop": ["x"], "seed": 3}
    assert (revision.units, revision.rows) == ((1, 4), 3)
    for unit in (1, 4):
        record = commit.read(LocalStore(out, private=PRIVATE), unit, 1)
        assert record.fingerprint == revision.fingerprint
    assert (out / history.JOB).read_bytes() == job


def test_settings_are_of_one_retry_alone(place, out, engine):
    double = engine(answer=lambda text: "y" * 50)
    done(retry_job(place, where="id = 1", settings=["sampling.max_tokens=30"], engine=double))
    done(retry_job(place, where="id = 4", engine=double))

    assert [request.params.max_tokens for request in double.requests] == [30, 6]
    assert [len(row["completion"]) for row in rows(out)][1:5:3] == [30, 6]


def test_every_row_is_there_once_at_every_step(spec, place, out, engine):
    before = rows(out)
    seen: set[int] = set()

    def look() -> None:
        found = rows(out)
        assert [row["id"] for row in found] == list(range(20))
        new = {row["id"] for row in found if row["completion"].startswith("(")}
        assert seen <= new <= set(range(1, 20, 2))
        assert [row for row in found if row["id"] not in new] == [
            row for row in before if row["id"] not in new
        ]
        seen.update(new)
        counts.add(len(new))

    counts: set[int] = set()
    odd = " OR ".join(f"id = {i}" for i in range(1, 20, 2))
    done(
        retry_job(
            place,
            where=odd,
            engine=engine(answer=again, max_num_seqs=2, num_steps=lambda r: 1 + r.request_id % 2),
            should_stop=StopAfter(NEVER, look),
        )
    )

    look()
    assert seen == set(range(1, 20, 2))
    assert len(counts) > 3


def test_retries_follow_each_other(spec, place, out, engine):
    first = rows(out)
    done(retry_job(place, where="id IN (1, 2, 9)", engine=engine(answer=again)))
    second = rows(out)
    done(
        retry_job(
            place,
            where="completion LIKE '(%' AND id < 5",
            engine=engine(answer=lambda text: f"<{text}>"),
        )
    )
    third = rows(out)

    changed = [
        [row["id"] for row, other in zip(one, two, strict=True) if row != other]
        for one, two in ((first, second), (second, third))
    ]
    assert changed == [[1, 2, 9], [1, 2]]
    assert third[2]["completion"] == "<q2>"
    one, two = revisions(out)
    assert (two.parent, two.units) == (one.fingerprint, (0,))
    kept = sorted(path.name for path in (out / output_view.SUPERSEDED).iterdir())
    assert kept == [
        "part-000000.parquet.r0",
        "part-000000.parquet.r1",
        "part-000002.parquet.r0",
    ]
    assert run_job(spec).state == "already finished"


def test_an_extended_job_can_be_retried_and_extended_again(write_rows, spec, place, out, engine):
    write_rows("a.parquet", id=[20, 21], q=["a", "b"])
    run_job(spec, engine=engine(), options=RunOptions(extends=True))
    double = engine(answer=again)
    done(retry_job(place, where="id = 3 OR id = 21", engine=double))
    assert asked(double) == [3, 21]
    write_rows("b.parquet", id=[22], q=["c"])
    before = folder_stamps.of_all(out)

    report = run_job(spec, engine=engine(), options=RunOptions(extends=True))

    assert report.run.revision == 3
    assert [row["id"] for row in rows(out)] == list(range(23))
    changed = [row["id"] for row in rows(out) if row["completion"].startswith("(")]
    assert changed == [3, 21]
    found = folder_stamps.of_all(out)
    assert {name: found[name] for name in before if name.startswith("part-")} == {
        name: value for name, value in before.items() if name.startswith("part-")
    }
    assert [revision.kind for revision in revisions(out)] == ["extend", "retry", "extend"]
    done(retry_job(place, where="id = 22", engine=double))
    assert rows(out)[22]["completion"] == "(c)"


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("row.file = 'rows.parquet' AND row.row_group = 1 AND row.index < 2", [7, 8]),
        ("error_code IS NULL AND id > 17", [18, 19]),
        ("error_code = 'x' OR NOT error_code = 'x'", []),
        ("error_code IS NOT NULL", []),
        ("completion LIKE '[q1_]'", [11, 12, 14, 15, 17, 18]),
        ("finish_reason IN ('length', 'error') AND id < 5", [1, 4]),
    ],
)
def test_conditions_look_at_structs_and_nulls(place, out, engine, where, expected):
    double = engine()
    report = retry_job(place, where=where, engine=double)

    assert asked(double) == expected
    assert (report is None) == (expected == [])


def test_a_retry_of_a_large_part_takes_its_rows_slice_by_slice(write_rows, make_spec, engine, out):
    write_rows(id=list(range(4500)), q=["a", "b"] * 2250)
    spec = make_spec(
        input={"prompt_column": "q"},
        output={"rows_per_part": 4400},
        engine={"max_num_seqs": 256},
    )
    run_job(spec, engine=engine(max_num_seqs=256))
    before = pq.read_table(out)
    chosen = [0, 4095, 4096, 4399, 4400, 4499]

    done(retry_job(str(out), where=f"id IN {tuple(chosen)}", engine=engine(answer=again)))

    after = pq.read_table(out)
    new = [i for i, text in enumerate(after["completion"].to_pylist()) if text.startswith("(")]
    kept = sorted(set(range(4500)) - set(chosen))
    assert new == chosen
    assert after.take(kept).equals(before.take(kept))
    assert after["id"].to_pylist() == list(range(4500))


def test_two_writers_do_not_write_at_once(place, out, engine):
    before = folder_stamps.of_all(out)

    with (
        Attempt(LocalStore(out, private=PRIVATE)),
        pytest.raises(OutputConflictError, match="another process is writing to"),
    ):
        retry_job(place, where=CUT, engine=engine())
    assert folder_stamps.of_all(out) == before


def test_an_input_that_changed_is_refused(place, out, engine, write_rows):
    before = folder_stamps.of_all(out)
    write_rows(id=list(range(20)), q=["other"] * 20)

    with pytest.raises(IdentityError, match=r"input file rows.parquet: "):
        retry_job(place, where=CUT, engine=engine())
    assert folder_stamps.of_all(out) == before


def test_parts_that_are_missing_are_refused(place, out, engine):
    (out / "part-000003.parquet").unlink()

    with pytest.raises(JaxPagedError) as caught:
        retry_job(place, where=CUT, engine=engine())
    assert caught.value.exit_code == 6
    assert revisions(out) == ()


def test_a_folder_that_was_moved_is_retried_where_it_is(spec, out, engine, tmp_path):
    shutil.move(out, tmp_path / "moved")

    report = done(retry_job(str(tmp_path / "moved"), where=CUT, settings=LONGER, engine=engine()))

    assert report.output.path == str(tmp_path / "moved")
    assert {row["finish_reason"] for row in rows(tmp_path / "moved")} == {"stop"}
    assert not out.exists()


def test_a_redone_part_that_is_damaged_is_repaired_by_a_run_and_the_retry(spec, place, out, engine):
    done(retry_job(place, where="id < 6", engine=engine(answer=again)))
    expected = rows(out)
    part = out / "part-000001.parquet"
    part.write_bytes(part.read_bytes()[:-5])
    double, watch = engine(), Watch()

    report = run_job(spec, engine=double, options=RunOptions(repairs=True), progress=watch)

    assert asked(double) == [4, 5, 6, 7]
    assert report.state == "retry unfinished"
    assert "revision 1 (retry of rows where id < 6) is to be finished next" in watch.notes[-1]
    double = engine(answer=again)
    done(retry_job(place, engine=double))
    assert asked(double) == [4, 5]
    assert rows(out) == expected
    assert run_job(spec).state == "already finished"


def test_the_report_after_a_retry_counts_the_table_as_it_is(spec, place, out, engine):
    first = run_job(spec)

    report = done(retry_job(place, where=CUT, settings=LONGER, engine=engine()))

    assert first.output.finish_reasons == {"stop": 13, "length": 7}
    assert report.output.finish_reasons == {"stop": 20}
    assert (report.output.rows, report.output.parts, report.input_rows) == (20, 5, 20)
    known_report = run_job(spec)
    assert known_report.output == report.output
    (out / output_view.REPORT).unlink()
    assert run_job(spec).output == report.output
    assert known_report.run == report.run


@pytest.mark.parametrize(
    "kind", [pa.string_view(), pa.binary_view(), pa.list_(pa.string_view())], ids=str
)
def test_columns_that_arrow_cannot_pick_rows_of_are_kept_too(
    write_rows, make_spec, engine, out, kind
):
    cells = [f"text {i}" * 4 for i in range(6)]
    views = [[cell] for cell in cells] if pa.types.is_list(kind) else cells
    write_rows(q=[f"q{i}" for i in range(6)], view=pa.array(views, kind))
    run_job(make_spec(input={"prompt_column": "q"}), engine=engine())
    before = [row["view"] for row in rows(out)]

    retry_job(str(out), where="completion IN ('[q1]', '[q4]')", engine=engine(answer=str.upper))

    assert [row["view"] for row in rows(out)] == before
    assert [row["completion"] for row in rows(out)][1:5:3] == ["Q1", "Q4"]
