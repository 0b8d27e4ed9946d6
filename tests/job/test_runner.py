import dataclasses
import json
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
from scripted_engine import ScriptedEngine
from tiny import write_tiny_llama

from jaxpaged.errors import (
    CheckpointError,
    ConfigError,
    IdentityError,
    InputSchemaError,
    JobError,
    OutputConflictError,
    TooManyRowErrors,
)
from jaxpaged.job.interrupt import JobInterrupted
from jaxpaged.job.progress import Snapshot
from jaxpaged.job.runner import run_job


@pytest.fixture
def out(tmp_path) -> pathlib.Path:
    return tmp_path / "out"


@pytest.fixture
def engine(tokenizer):
    def make(**options) -> ScriptedEngine:
        return ScriptedEngine(tokenizer, **options)

    return make


def rows(out: pathlib.Path) -> list[dict]:
    return pyarrow.dataset.dataset(out, format="parquet").to_table().to_pylist()


def parts(out: pathlib.Path) -> list[str]:
    return sorted(path.name for path in out.glob("*.parquet"))


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
    assert [row[0] for row in duckdb.sql(query).fetchall()] == ids
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
    assert found[3]["error_message"] == "max_tokens must be at least 1, got 0"
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


def test_a_damaged_part_is_told_of_and_completed_again(write_rows, make_spec, engine, out):
    write_rows(q=["a", "b", "c"])
    spec = make_spec(input={"prompt_column": "q"}, output={"rows_per_part": 1})
    run_job(spec, engine=engine())
    before = rows(out)
    part = out / "part-000001.parquet"
    part.write_bytes(part.read_bytes()[:300])
    watch = Watch()

    report = run_job(spec, engine=engine(), progress=watch)

    assert rows(out) == before
    assert watch.notes[0] == "part-000001.parquet is damaged and is completed again"
    assert (report.run.parts_kept, report.run.parts_discarded, report.run.rows) == (2, 1, 1)
    assert report.warnings == ("1 parts of earlier runs were damaged and are replaced",)


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

    assert again.state == "finished"
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
    with pytest.raises(IdentityError, match=r"rows.parquet: "):
        run_job(spec)
    write_rows("more.parquet", q=["b"])
    with pytest.raises(
        IdentityError, match=r"input files: \['rows.parquet'\] -> \['more.parquet', "
    ):
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


def test_too_many_row_errors_fail_the_job_and_keep_its_parts(write_rows, make_spec, engine, out):
    write_rows(q=["a"] * 40 + [None] * 10)
    sections = {"input": {"prompt_column": "q"}, "output": {"rows_per_part": 10}}

    with pytest.raises(TooManyRowErrors) as caught:
        run_job(make_spec(max_errors=3, **sections), engine=engine())

    message = str(caught.value)
    assert "more than max_errors allows (3)" in message
    assert "rows.parquet, row group 0, row 40: null_prompt (column 'q' is null)" in message
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
    write_rows, make_spec, engine, out, tmp_path
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

    for _ in range(3):
        double = engine(max_num_seqs=4)
        stamps = {path: path.stat().st_mtime_ns for path in out.glob("*.parquet")}
        with pytest.raises(
            JobInterrupted, match=r"of 64 rows; the \d+ rows of finished parts are kept"
        ):
            run_job(spec, engine=double, should_stop=StopAfter(5))
        assert not double.has_work()
        assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
        assert [row["id"] for row in rows(out)] == list(range(len(rows(out))))
        assert {request.request_id for request in double.requests}.isdisjoint(
            range(8 * len(stamps))
        )
    assert len(parts(out)) >= 3
    report = run_job(spec, engine=engine())

    assert rows(out) == rows(tmp_path / "whole")
    assert report.scores == expected.scores
    assert dataclasses.replace(report.output, path="") == dataclasses.replace(
        expected.output, path=""
    )
    assert report.run.rows == 64 - 8 * report.run.parts_kept


def test_a_stopped_run_reports_what_is_in_the_folder(write_rows, make_spec, engine, out):
    write_rows(q=["a"] * 6000)
    spec = make_spec(
        input={"prompt_column": "q"},
        output={"rows_per_part": 100_000},
        engine={"max_num_seqs": 64},
    )

    with pytest.raises(JobInterrupted, match=r"the 0 rows of finished parts are kept"):
        run_job(spec, engine=engine(max_num_seqs=64), should_stop=StopAfter(80))

    report = json.loads((out / "_jaxpaged" / "report.json").read_text())
    assert report["run"]["rows"] > 4096, "rows were written aside"
    assert (report["state"], report["output"]["parts"], report["output"]["rows"]) == (
        "stopped",
        0,
        0,
    )


KILLED = """
import pathlib, sys
sys.path.insert(0, sys.argv.pop())
from scripted_engine import ScriptedEngine
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


def test_the_engine_is_fed_just_ahead_of_need(write_rows, make_spec, engine):
    write_rows(q=["a"] * 500)
    double = engine(max_num_seqs=4)

    run_job(make_spec(input={"prompt_column": "q"}, engine={"max_num_seqs": 4}), engine=double)

    assert double.max_unfinished == 12


class Watch:
    """Remembers what a job says about itself."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.begun: tuple[int, int] | None = None
        self.snapshots: list[Snapshot] = []
        self.has_ended = False

    def note(self, text: str) -> None:
        self.notes.append(text)

    def begin(self, *, total: int, done: int) -> None:
        self.begun = (total, done)

    def update(self, snapshot: Snapshot) -> None:
        self.snapshots.append(snapshot)

    def end(self) -> None:
        self.has_ended = True


def test_progress_counts_every_row_once(write_rows, make_spec, engine):
    write_rows(q=["a", None, "b"] * 10)
    watch = Watch()

    run_job(make_spec(input={"prompt_column": "q"}), engine=engine(), progress=watch)

    assert watch.notes == ["a scripted engine"]
    assert watch.begun == (30, 0)
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
    assert "secret" not in text
    assert "classified" not in text
    assert [sample.completion for sample in report.samples] == ["[topsecret]"]
    assert found["report_version"] == 1
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

    with pytest.raises(JobError, match=r"part-000001.parquet: cannot read this part: Too many"):
        run_job(spec, engine=engine())
    assert part.is_symlink()


def test_an_engine_that_loses_a_row_is_an_error_and_no_hang(write_rows, make_spec, engine):
    write_rows(q=["a"] * 20)
    double = engine()
    step = double.step

    def lossy() -> list:
        return [done for done in step() if done.request_id != 7]

    double.step = lossy

    with pytest.raises(AssertionError, match="gave no result for 20 rows"):
        run_job(make_spec(input={"prompt_column": "q"}), engine=double)
