"""Outputs of jobs that differ in one thing, compared row by row."""

import io
import json
import pathlib
from collections.abc import Callable

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import rich.console

from jaxpaged.errors import OutputConflictError, StorageError
from jaxpaged.job.interrupt import JobInterrupted
from jaxpaged.job.look import diff_table
from jaxpaged.job.look.diff import Diff, diff
from jaxpaged.job.look.row_comparison import MAX_SAMPLES
from jaxpaged.job.planned_job import RunOptions
from jaxpaged.job.retry import retry_job
from jaxpaged.job.runner import run_job
from jaxpaged.storage.local_store import LocalStore


def compare(a: pathlib.Path, b: pathlib.Path) -> Diff:
    return diff(*(LocalStore(out, private="_jaxpaged") for out in (a, b)))


def counts(found: Diff) -> tuple[int, int, int, int]:
    return found.same, found.changed, found.only_in_a, found.only_in_b


def shown(found: Diff) -> str:
    text = io.StringIO()
    diff_table.show(found, rich.console.Console(file=text, width=200))
    return text.getvalue()


@pytest.fixture
def run(make_spec, engine, tmp_path) -> Callable[..., pathlib.Path]:
    """Runs a job over the test's input; says where its output is."""

    def run_into(
        name: str,
        answer: Callable[[str], str] = str,
        options: RunOptions | None = None,
        **sections: dict[str, object],
    ) -> pathlib.Path:
        own = {"path": str(tmp_path / name), "rows_per_part": 4}
        sections["input"] = {"prompt_column": "q"} | sections.get("input", {})
        sections["output"] = own | sections.get("output", {})
        run_job(make_spec(**sections), engine=engine(answer=answer), options=options)
        return tmp_path / name

    return run_into


def test_the_same_job_gives_the_same_rows_however_it_is_cut(write_rows, run):
    write_rows("a.parquet", q=[f"a{i}" for i in range(10)], row_group_size=3)
    write_rows("b.parquet", q=["b", None, "c"])

    found = compare(run("one"), run("two", output={"rows_per_part": 5}))

    assert counts(found) == (13, 0, 0, 0)
    assert (found.columns, found.sample, found.retyped) == ({}, (), ())
    assert (found.is_same, found.exit_code) == (True, 0)
    assert found.jobs == ("output.rows_per_part: 4 -> 5",)
    assert found.to_json()["is_same"] is True


def test_changed_rows_are_counted_by_column_and_shown(write_rows, run):
    write_rows("a.parquet", q=[f"q{i}" for i in range(10)], row_group_size=4)
    one = run("one", lambda text: "same")
    two = run("two", lambda text: "same" if text[-1] != "6" else "same\x1b[2J")

    found = compare(one, two)

    assert counts(found) == (9, 1, 0, 0)
    assert found.columns == {"completion": 1, "completion_tokens": 1}
    assert found.exit_code == 1
    (row,) = found.sample
    assert (row.file, row.row_group, row.index) == ("a.parquet", 1, 2)
    assert [(cell.column, cell.a) for cell in row.cells] == [
        ("completion", "same"),
        ("completion_tokens", "4"),
    ]
    text = shown(found)
    assert "a.parquet, row group 1, row 2" in text
    assert "completion  same -> same\ufffd[2J" in text
    assert "\x1b" not in text


def test_row_text_is_in_the_json_only_if_asked_for(write_rows, run):
    write_rows(q=["a"])
    found = compare(run("one", lambda text: "secret"), run("two", lambda text: "other"))

    plain, full = json.dumps(found.to_json()), json.dumps(found.to_json(has_cells=True))

    assert "secret" not in plain
    assert json.loads(plain)["sample"] == [
        {"file": "rows.parquet", "row_group": 0, "index": 0}
        | {"columns": ["completion", "completion_tokens"]}
    ]
    assert "secret" in full
    assert json.loads(full)["sample"][0]["cells"][0] == {
        "column": "completion",
        "a": "secret",
        "b": "other",
    }


def test_long_text_is_shown_where_it_begins_to_differ(write_rows, run):
    write_rows(q=["a"])
    start = "x" * 5000
    one, two = run("one", lambda text: start + "y" * 900), run("two", lambda text: start + "z")

    (cell,) = (c for c in compare(one, two).sample[0].cells if c.column == "completion")

    assert cell.a.startswith("..." + "x" * 20 + "yyy")
    assert cell.a.endswith("y...")
    assert cell.b == "..." + "x" * 20 + "z"
    assert len(cell.a) < 250


def test_the_sample_is_bounded(write_rows, run):
    write_rows(q=["a"] * 50)
    found = compare(run("one", lambda text: "a"), run("two", lambda text: "b"))
    assert found.changed == 50
    assert len(found.sample) == MAX_SAMPLES
    assert [row.index for row in found.sample] == list(range(MAX_SAMPLES))


def test_parts_that_are_missing_are_rows_of_the_other_side(write_rows, run):
    write_rows(q=[f"q{i}" for i in range(10)])
    one, two = run("one"), run("two", lambda text: text.replace("9", "!"))
    (one / "part-000000.parquet").unlink()
    (two / "part-000001.parquet").unlink()

    found = compare(one, two)

    assert counts(found) == (1, 1, 4, 4)
    assert counts(compare(two, one)) == (1, 1, 4, 4)
    (one / "part-000001.parquet").unlink()
    assert counts(compare(one, two)) == (1, 1, 0, 4)


def test_an_unfinished_job_can_be_compared(write_rows, run, make_spec, engine, out):
    write_rows(q=[f"q{i}" for i in range(10)])
    spec = make_spec(input={"prompt_column": "q"}, output={"rows_per_part": 4})
    first_part = (out / "part-000000.parquet").exists
    slow = engine(answer=str, num_steps=lambda request: 1 + request.request_id)
    with pytest.raises(JobInterrupted):
        run_job(spec, engine=slow, should_stop=first_part)

    assert counts(compare(out, run("whole"))) == (4, 0, 0, 6)


def test_files_in_another_order_are_found_by_name(write_rows, run):
    for name in ("b.parquet", "d.parquet"):
        write_rows(name, q=[f"{name}{i}" for i in range(5)], row_group_size=2)
    one = run("one")
    for name in ("a.parquet", "c.parquet"):
        write_rows(name, q=[f"{name}{i}" for i in range(3)])
    run("one", options=RunOptions(extends=True))
    two = run("two")
    assert pq.read_table(one)["q"].to_pylist() != pq.read_table(two)["q"].to_pylist()

    found = compare(one, two)

    assert (counts(found), found.jobs) == ((16, 0, 0, 0), ())


def test_files_of_one_side_and_files_that_changed(write_rows, run):
    write_rows("a.parquet", q=["a", "b", "c", "d", "e"], row_group_size=2)
    old = write_rows("old.parquet", q=["x", "y"])
    one = run("one")
    old.unlink()
    write_rows("new.parquet", q=["z"] * 6)
    write_rows("a.parquet", q=["a", "B", "c", "d", "e", "f"], row_group_size=3)
    two = run("two")

    found = compare(one, two)

    # Row groups of 2, 2, 1 and of 3, 3: the rows that both have are 2 and 2.
    assert found.only_in_a == 1 + 2
    assert found.only_in_b == 1 + 1 + 6
    assert (found.same, found.changed) == (1, 3)
    assert [(row.row_group, row.index) for row in found.sample] == [(0, 1), (1, 0), (1, 1)]
    assert found.jobs == ("input file a.parquet: other bytes",)


def test_columns_of_one_side_are_named_and_not_compared(write_rows, run):
    write_rows(q=["a", "b"], extra=[1, 2], other=[3, 4])
    one = run("one", input={"columns": ["q", "extra"]})
    two = run("two", input={"columns": ["q", "other"]}, output={"prompt": True})

    found = compare(one, two)

    assert counts(found) == (2, 0, 0, 0)
    assert found.columns_only_in_a == ("extra",)
    assert found.columns_only_in_b == ("other", "prompt")
    assert not found.is_same
    assert "extra (not compared)" in shown(found)


def test_types_that_differ_are_compared_by_value_if_they_can_be(write_rows, run):
    write_rows(q=["a", "b"], text=pa.array(["x", "y"]), n=pa.array([1, 2]))
    one = run("one")
    write_rows(
        q=pa.array(["a", "b"]).dictionary_encode(),
        text=pa.array(["x", "z"], pa.large_string()),
        n=pa.array(["1", "2"]),
    )
    two = run("two")

    found = compare(one, two)

    assert [(c.name, c.b, c.is_compared) for c in found.retyped] == [
        ("q", "dictionary<values=string, indices=int32, ordered=0>", True),
        ("text", "large_string", True),
        ("n", "string", False),
    ]
    assert found.columns == {"text": 1, "n": 2}
    assert "int64 -> string (not comparable: all rows differ)" in shown(found)


def test_floats_are_compared_bit_for_bit_but_nan_is_nan(write_rows, run):
    nan = float("nan")
    write_rows(q=["a"] * 3, x=[0.0, nan, 0.1], xs=[[nan], [0.0], []])
    one = run("one")
    write_rows(q=["a"] * 3, x=[-0.0, nan, 0.1], xs=[[nan], [-0.0], []])
    two = run("two")

    found = compare(one, two)

    assert found.columns == {"x": 1, "xs": 1}
    assert (found.same, found.changed) == (1, 2)


def test_jobs_that_differ_say_how(write_rows, run, engine):
    write_rows(q=["a", "long"])
    one = run("one", sampling={"max_tokens": 3})
    two = run("two", sampling={"max_tokens": 3, "temperature": 0.5})
    retry_job(
        str(two),
        where="finish_reason = 'length'",
        settings=["sampling.max_tokens=9"],
        engine=engine(answer=str),
    )

    found = compare(one, two)

    assert found.jobs == (
        "revision 1: none -> \"retry where finish_reason = 'length', sampling.max_tokens=9\"",
        "sampling.temperature: 0.0 -> 0.5",
    )
    assert found.changed == 1
    assert found.columns.keys() == {
        "completion",
        "finish_reason",
        "stop_reason",
        "completion_tokens",
    }
    assert "sampling.temperature: 0.0 -> 0.5" in shown(found)


def test_empty_jobs_are_the_same(write_rows, run):
    write_rows(q=pa.array([], pa.string()))
    found = compare(run("one"), run("two"))
    assert (counts(found), found.is_same) == ((0, 0, 0, 0), True)


def test_a_folder_without_a_job_is_refused(write_rows, run, tmp_path):
    write_rows(q=["a"])
    one = run("one")
    with pytest.raises(OutputConflictError, match="holds no output of jaxpaged"):
        compare(one, tmp_path / "nothing")


def test_rows_in_a_wrong_place_are_refused(write_rows, run):
    write_rows(q=[f"q{i}" for i in range(8)])
    one, two = run("one"), run("two")
    table = pq.read_table(two / "part-000001.parquet")
    pq.write_table(table.take(pa.array([0, 2, 1, 3])), two / "part-000001.parquet")
    with pytest.raises(OutputConflictError, match=r"part-000001.parquet does not hold the rows"):
        compare(one, two)

    pq.write_table(table.slice(0, 3), two / "part-000001.parquet")
    with pytest.raises(OutputConflictError, match=r"part-000001.parquet does not hold the rows"):
        compare(one, two)


def test_a_part_that_does_not_read_is_an_error(write_rows, run):
    write_rows(q=[f"q{i}" for i in range(8)])
    one, two = run("one"), run("two")
    path = two / "part-000001.parquet"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(StorageError, match=r"part-000001.parquet: cannot read this part"):
        compare(one, two)


def test_row_groups_that_are_cut_differently_are_compared(write_rows, run):
    """Parts of many row groups, cut differently on both sides, with one changed row."""
    write_rows(q=[f"q{i}" for i in range(300)], row_group_size=7)
    one = run("one", output={"rows_per_part": 300})
    two = run("two", lambda text: text.replace("q211", "!"), output={"rows_per_part": 90})
    table = pq.read_table(one / "part-000000.parquet")
    pq.write_table(table, one / "part-000000.parquet", row_group_size=11)

    found = compare(one, two)

    assert counts(found) == (299, 1, 0, 0)
    assert (found.sample[0].row_group, found.sample[0].index) == divmod(211, 7)
