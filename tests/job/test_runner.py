import json
import shutil

import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
from job_output import Watch, parts, rows
from tiny import write_tiny_llama

from jaxpaged.errors import (
    CheckpointError,
    ConfigError,
    IdentityError,
    OutputConflictError,
)
from jaxpaged.job.runner import run_job


def test_rows_come_out_in_input_order_for_every_reader(write_rows, make_spec, engine, out):
    ids = list(range(100))
    write_rows("a.parquet", id=ids[:37], q=[f"q{i}" for i in ids[:37]], row_group_size=10)
    write_rows("b.parquet", id=ids[37:], q=[f"q{i}" for i in ids[37:]])
    spec = make_spec(input={"prompt_column": "q"}, output={"rows_per_part": 16})

    # The later a row comes, the sooner it is done.
    report = run_job(
        spec, engine=engine(num_steps=lambda request: 1 + (100 - request.request_id) % 9)
    )

    assert [row["id"] for row in rows(out)] == ids
    assert [row["completion"] for row in rows(out)] == [f"[q{i}]" for i in ids]
    assert pd.read_parquet(out)["id"].tolist() == ids
    assert pq.read_table(out)["id"].to_pylist() == ids
    query = f"select id from read_parquet('{out}/*.parquet')"
    with duckdb.connect() as connection:
        assert [row[0] for row in connection.execute(query).fetchall()] == ids
    assert (report.state, report.output.rows, report.output.parts) == ("finished", 100, 7)
    assert parts(out) == [f"part-{i:06d}.parquet" for i in range(7)]
    assert (out / "_SUCCESS").exists()


def test_the_engine_is_asked_what_the_rows_say(write_rows, make_spec, engine):
    write_rows(q=["a", "b", "c"], n=[1, None, 3], s=[5, 6, None])
    spec = make_spec(
        input={"prompt_column": "q"},
        sampling={"max_tokens": 9, "columns": {"max_tokens": "n", "seed": "s"}},
    )
    double = engine()

    run_job(spec, engine=double)

    assert [request.request_id for request in double.requests] == [0, 1, 2]
    assert [request.params.max_tokens for request in double.requests] == [1, 9, 3]
    assert [request.params.seed for request in double.requests] == [5, 6, None]
    assert len({request.address for request in double.requests}) == 3


def test_rows_at_fault_become_rows(write_rows, make_spec, engine, out):
    write_rows(q=["ok", None, "x" * 40, "ok", ""], n=[1, 1, 1, 0, 1])
    spec = make_spec(
        input={"prompt_column": "q"}, sampling={"columns": {"max_tokens": "n"}, "max_tokens": 5}
    )

    report = run_job(spec, engine=engine(max_model_len=32))

    found = rows(out)
    assert [row["error_code"] for row in found] == [
        None,
        "null_prompt",
        "prompt_too_long",
        "bad_row_params",
        None,
    ]
    assert [row["finish_reason"] for row in found] == [
        "length",
        "error",
        "error",
        "error",
        "length",
    ]
    assert found[2]["prompt_tokens"] == 41
    assert found[1]["prompt_tokens"] is None
    assert found[3]["error_message"] == "column 'n': max_tokens must be at least 1, got 0"
    assert found[1]["completion"] is None
    assert found[4]["completion"] == "["
    assert {error.code: error.count for error in report.errors} == {
        "null_prompt": 1,
        "prompt_too_long": 1,
        "bad_row_params": 1,
    }


def test_failed_rows_have_a_seed_and_no_tokens_like_others(write_rows, make_spec, engine, out):
    write_rows(q=["ok", None, None, None, "x" * 40], s=[5, 6, None, -1, 8])
    spec = make_spec(
        input={"prompt_column": "q"},
        output={"token_ids": True},
        sampling={"columns": {"seed": "s"}, "max_tokens": 2},
        seed=9,
    )

    run_job(spec, engine=engine(max_model_len=32))

    assert [row["seed"] for row in rows(out)] == [5, 6, 9, 9, 8]
    assert [row["token_ids"] for row in rows(out)] == [[0, 1], [], [], [], []]


def test_views_and_failed_rows_go_together(write_rows, make_spec, engine, out):
    lists = pa.array([["a"], None], pa.list_(pa.string_view()))
    write_rows(q=pa.array(["a", None], pa.string_view()), tags=lists)

    report = run_job(make_spec(input={"prompt_column": "q"}), engine=engine())

    assert report.num_errors == 1
    assert [row["tags"] for row in rows(out)] == [["a"], None]


def test_text_that_is_not_utf_8_spoils_one_row(tmp_path, make_spec, engine, out):
    raw = pa.array([b"fine", b"\xff", b"good"])
    text = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"q": text}), tmp_path / "in" / "x.parquet")

    run_job(make_spec(input={"prompt_column": "q"}), engine=engine())

    assert [row["completion"] for row in rows(out)] == ["[fine]", None, "[good]"]
    assert [row["error_code"] for row in rows(out)] == [None, "invalid_utf8", None]
    assert [row["q"] for row in rows(out)] == ["fine", None, "good"]


def test_moments_that_python_cannot_hold_are_still_written(write_rows, make_spec, engine, out):
    moments = pa.array([1, 2**62], pa.timestamp("us"))
    write_rows(t=moments)

    run_job(make_spec(input={"prompt": "{{ t }}"}), engine=engine())

    table = pq.read_table(out)
    assert table["t"].equals(pa.chunked_array([moments]))
    assert "1970-01-01 00:00:00.000001" in table["completion"][0].as_py()
    assert table["error_code"].null_count == 2


def test_no_rows_and_no_row_groups_end_well(write_rows, make_spec, engine, out):
    path = write_rows("a.parquet", q=pa.array([], pa.string()))
    pq.ParquetWriter(path.parent / "b.parquet", pa.schema([("q", pa.string())])).close()
    spec = make_spec(input={"prompt_column": "q"})

    report = run_job(spec)  # without rows no model is loaded

    assert (report.state, report.output.rows) == ("finished", 0)
    assert pq.read_table(out).num_rows == 0
    assert pq.read_table(out).schema.names[:2] == ["q", "completion"]
    assert run_job(spec).state == "already finished"

    write_rows("c.parquet", q=["x"])
    other = make_spec(input={"prompt_column": "q"}, output={"path": f"{out}2"})
    assert run_job(other, engine=engine()).output.rows == 1


def test_a_finished_job_is_reported_without_a_model(write_rows, make_spec, engine, out):
    write_rows(q=["a", "b"], answer=["[a]", "x"])
    scoring = {"reference": "answer", "metrics": ["exact_match"]}
    spec = make_spec(input={"prompt_column": "q"}, eval=scoring)
    first = run_job(spec, engine=engine())
    stamps = {path: path.stat().st_mtime_ns for path in out.rglob("*")}

    again = run_job(spec)

    assert again.state == "already finished"
    assert again.scores == first.scores
    assert again.scores[0].overall.mean == 0.5
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == stamps
    assert run_job(make_spec(input={"prompt_column": "q"}, eval=scoring, max_errors=1)) == again


def test_a_finished_job_that_was_moved_is_reported_where_it_is(
    write_rows, make_spec, engine, out, tmp_path
):
    write_rows(q=["a"])
    run_job(make_spec(input={"prompt_column": "q"}), engine=engine())
    out.rename(tmp_path / "moved")

    spec = make_spec(input={"prompt_column": "q"}, output={"path": str(tmp_path / "moved")})

    assert run_job(spec).output.path == str(tmp_path / "moved")


def test_parts_of_another_model_are_not_continued(write_rows, make_spec, engine, out, tmp_path):
    write_rows(q=["a", "b", "c"])
    model = write_tiny_llama(tmp_path / "model")
    spec = make_spec(model=str(model), input={"prompt_column": "q"}, output={"rows_per_part": 1})
    run_job(spec, engine=engine())
    (out / "part-000001.parquet").unlink()
    (out / "_SUCCESS").unlink()
    shutil.rmtree(model)
    write_tiny_llama(model, layers=1)

    with pytest.raises(IdentityError, match=r"the model's weights: "):
        run_job(spec, engine=engine())
    assert parts(out) == ["part-000000.parquet", "part-000002.parquet"]


def test_a_model_that_does_not_suit_the_job_leaves_no_folder(
    write_rows, make_spec, engine, out, tmp_path
):
    write_rows(q=["a"])
    column = {"input": {"prompt_column": "q"}}
    messages = [{"role": "user", "content": "{{ q }}"}]
    truncated = write_tiny_llama(tmp_path / "truncated")
    weights = truncated / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    plain = write_tiny_llama(tmp_path / "plain", chat_template=None)

    with pytest.raises(ConfigError, match="does not exist"):
        run_job(make_spec(model=str(tmp_path / "tpyo"), **column))
    with pytest.raises(CheckpointError):
        run_job(make_spec(model=str(truncated), **column))
    with pytest.raises(ConfigError, match=r"max_model_len is 1000, .* at most 256"):
        run_job(make_spec(engine={"max_model_len": 1000}, **column))
    with pytest.raises(ConfigError, match="no chat template"):
        run_job(make_spec(model=str(plain), input={"messages": messages}))
    assert not out.exists()


def test_a_lost_report_is_counted_again(write_rows, make_spec, engine, out):
    write_rows(q=["a", None])
    spec = make_spec(input={"prompt_column": "q"})
    first = run_job(spec, engine=engine())
    (out / "_jaxpaged" / "report.json").write_text("{}")

    again = run_job(spec)

    assert again.state == "already finished"
    assert again.errors == first.errors
    assert again.output == first.output
    assert (out / "_SUCCESS").exists()


def test_a_changed_job_or_input_is_refused_with_the_difference(write_rows, make_spec, engine, out):
    write_rows(q=["a"])
    spec = make_spec(input={"prompt_column": "q"})
    run_job(spec, engine=engine())
    before = rows(out)

    with pytest.raises(IdentityError, match=r"sampling.temperature: 0.0 -> 0.5"):
        run_job(make_spec(input={"prompt_column": "q"}, sampling={"temperature": 0.5}))
    write_rows(q=["b"])
    with pytest.raises(IdentityError, match=r"input file rows.parquet: content 'sha256:"):
        run_job(spec)
    write_rows("more.parquet", q=["b"])
    with pytest.raises(IdentityError, match=r"input file more.parquet: is new, 1 rows"):
        run_job(spec)
    assert rows(out) == before


def test_a_folder_of_somebody_else_is_refused(write_rows, make_spec, engine, out):
    write_rows(q=["a"])
    out.mkdir()
    (out / "thesis.txt").write_text("precious")

    with pytest.raises(OutputConflictError, match=r"it holds thesis.txt"):
        run_job(make_spec(input={"prompt_column": "q"}), engine=engine())
    assert [path.name for path in out.iterdir()] == ["thesis.txt"]


def test_the_input_is_never_written_to(write_rows, make_spec, engine):
    path = write_rows(q=["a"])
    before = path.read_bytes()

    for output in (path, path.parent, path.parent / "out", path.parent.parent):
        with pytest.raises(ConfigError, match=r"output.path: .* the input"):
            run_job(
                make_spec(input={"prompt_column": "q"}, output={"path": str(output)}),
                engine=engine(),
            )

    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == ["rows.parquet"]


def test_the_engine_is_fed_just_ahead_of_need(write_rows, make_spec, engine):
    write_rows(q=["a"] * 500)
    double = engine(max_num_seqs=4)

    run_job(make_spec(input={"prompt_column": "q"}, engine={"max_num_seqs": 4}), engine=double)

    assert double.max_unfinished == 12


def test_progress_counts_every_row_once(write_rows, make_spec, engine):
    write_rows(q=["a", None, "b"] * 10)
    watch = Watch()

    run_job(make_spec(input={"prompt_column": "q"}), engine=engine(), progress=watch)

    assert watch.notes == ["a scripted engine"]
    assert watch.begun == (30, 0, 0)
    done = [snapshot.rows for snapshot in watch.snapshots]
    assert done == sorted(done)
    assert done[-1] == 30
    assert watch.snapshots[-1].errors == 10
    # Of the 20 prompts of two tokens and their completions of one.
    assert watch.snapshots[-1].prompt_tokens == 20
    assert watch.snapshots[-1].completion_tokens == 20
    assert watch.has_ended


def test_the_report_beside_the_parts_holds_no_row_text(write_rows, make_spec, engine, out):
    write_rows(q=["topsecret", None], answer=["classified", "classified"])
    spec = make_spec(
        input={"prompt": "{{ q }}"}, eval={"reference": "answer", "metrics": ["contains"]}
    )

    report = run_job(spec, engine=engine())

    text = (out / "_jaxpaged" / "report.json").read_text()
    found = json.loads(text)
    assert "topsecret" not in text
    assert "classified" not in text
    assert [sample.completion for sample in report.samples] == ["[topsecret]"]
    assert found["report_version"] == 3
    assert found["versions"]["pyarrow"] == pa.__version__
    assert found["run"]["engine"]["implementation"] == "scripted"
    assert found["job"]["input"]["prompt"] == "{{ q }}"
    assert found["errors"][0]["examples"] == [
        {
            "file": "rows.parquet",
            "row_group": 0,
            "index": 1,
            "message": "input.prompt would write a null of column 'q'",
        }
    ]
    assert found["scores"][0]["overall"] == {"correct": 0, "scored": 2, "mean": 0.0}


def test_rows_cut_off_at_a_limit_raise_a_warning(write_rows, make_spec, engine):
    write_rows(q=["abc"] * 4)
    spec = make_spec(input={"prompt_column": "q"}, sampling={"max_tokens": 2})

    report = run_job(spec, engine=engine())

    assert report.output.truncated_share == 1.0
    assert report.warnings == (
        "100% of the rows were cut off at a limit; raise sampling.max_tokens or "
        "engine.max_model_len",
    )


def test_rows_with_special_text_are_counted(write_rows, make_spec, engine, out):
    write_rows(q=["a</s>b", "plain"])

    report = run_job(
        make_spec(input={"prompt_column": "q"}, output={"prompt": True}), engine=engine()
    )

    assert report.run.rows_with_special_text == 1
    assert "it was taken as text" in report.warnings[0]
    assert [row["prompt"] for row in rows(out)] == ["a</s>b", "plain"]


def test_an_engine_that_loses_a_row_is_an_error_and_no_hang(write_rows, make_spec, engine):
    write_rows(q=["a"] * 20)
    double = engine()
    step = double.step

    def lossy() -> list:
        return [done for done in step() if done.request_id != 7]

    double.step = lossy

    with pytest.raises(AssertionError, match="gave no result for 20 rows"):
        run_job(make_spec(input={"prompt_column": "q"}), engine=double)
