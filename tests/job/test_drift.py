import os
import pathlib
import shutil
import time

import folder_stamps
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.numpy
from job_output import parts, rows
from stop_after import StopAfter
from tiny import write_tiny_llama

from jaxpaged.errors import ConfigError, IdentityError, OutputConflictError
from jaxpaged.job.interrupt import JobInterrupted
from jaxpaged.job.output import history
from jaxpaged.job.output.output_view import PRIVATE
from jaxpaged.job.planned_job import RunOptions
from jaxpaged.job.runner import run_job
from jaxpaged.job.spec import JobSpec

VERIFIES = RunOptions(verifies_weights=True)


@pytest.fixture
def half(write_rows, make_spec, engine, out):
    """Stops a job of twelve rows in the middle, in its second part of four."""

    def begin(options: RunOptions | None = None, **sections: object) -> JobSpec:
        write_rows(q=[f"q{i}" for i in range(12)])
        small = {"output": {"rows_per_part": 4}, "engine": {"max_num_seqs": 2}}
        spec = make_spec(input={"prompt_column": "q"}, **small | sections)
        with pytest.raises(JobInterrupted):
            run_job(spec, engine=engine(max_num_seqs=2), should_stop=StopAfter(3), options=options)
        assert parts(out) == ["part-000000.parquet"]
        return spec

    return begin


def refusal(spec: JobSpec, out: pathlib.Path, options: RunOptions | None = None) -> str:
    """What a run says, which changes nothing and needs no engine."""
    before = folder_stamps.of_all(out)
    with pytest.raises(IdentityError) as caught:
        run_job(spec, options=options)
    assert caught.value.exit_code == 3
    assert folder_stamps.of_all(out) == before
    return str(caught.value)


def test_a_job_that_differs_is_refused_half_way_too(half, make_spec, engine, out):
    spec = half()
    same = {"output": {"rows_per_part": 4}, "engine": {"max_num_seqs": 2}}

    text = refusal(
        make_spec(input={"prompt_column": "q"}, sampling={"temperature": 0.5}, **same), out
    )
    assert f"{out} holds the results of a job that differs" in text
    assert "sampling.temperature: 0.0 -> 0.5" in text
    assert "Change that back to continue the job, or choose another output.path" in text
    assert "--extend" not in text

    assert run_job(spec, engine=engine()).output.rows == 12


def test_a_job_of_which_only_a_journal_is_left_is_refused_on_drift(
    write_rows, make_spec, engine, out
):
    write_rows(q=["a", "b", "c"])
    spec = make_spec(input={"prompt_column": "q"}, engine={"max_num_seqs": 1})
    with pytest.raises(JobInterrupted):
        run_job(spec, engine=engine(max_num_seqs=1), should_stop=StopAfter(1))
    assert parts(out) == []
    assert not (out / PRIVATE / "commits").exists()

    assert "seed: 0 -> 1" in refusal(make_spec(input={"prompt_column": "q"}, seed=1), out)
    double = engine()
    assert run_job(spec, engine=double).run.rows_resumed == 1
    assert [request.request_id for request in double.requests] == [1, 2]


def test_a_job_that_completed_nothing_may_become_another(write_rows, make_spec, engine, out):
    write_rows(q=["a", "b"])
    column = {"input": {"prompt_column": "q"}}
    for seed in (0, 1, 1):
        with pytest.raises(JobInterrupted):
            run_job(make_spec(seed=seed, **column), engine=engine(), should_stop=StopAfter(0))
    write_rows(q=["c", "d", "e"])

    report = run_job(make_spec(seed=2, **column), engine=engine())

    assert report.state == "finished"
    assert [row["completion"] for row in rows(out)] == ["[c]", "[d]", "[e]"]
    assert "seed: 2 -> 0" in refusal(make_spec(**column), out)


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("config", "config.json"),
        ("generation_config", "generation_config.json"),
        ("tokenizer", "tokenizer.json"),
        ("tokenizer", "tokenizer_config.json"),
        ("chat_template", "chat_template.jinja"),
        ("weights", "model.safetensors"),
    ],
)
def test_every_part_of_the_model_counts(half, tmp_path, out, part, name):
    model = write_tiny_llama(tmp_path / "model")
    (model / "chat_template.jinja").write_text("{{ messages }}")
    spec = half(model=str(model))
    if name == "model.safetensors":
        # Other headers, the same tensors.
        tensors = safetensors.numpy.load_file(model / name)
        safetensors.numpy.save_file(tensors, model / name, metadata={"made": "again"})
    else:
        path = model / name
        path.write_text(path.read_text().replace(" ", "  ", 1) + "\n")

    assert f"the model's {part}: '" in refusal(spec, out)


def test_run_keys_may_change_and_the_rows_stay_the_same(half, make_spec, engine, out, tmp_path):
    half()
    record = (out / history.JOB).read_bytes()
    changed = make_spec(
        input={"prompt_column": "q", "path": str(tmp_path / "in" / "*.parquet")},
        output={"rows_per_part": 4, "durability": "process", "journal_interval": 0.0},
        engine={
            "max_num_seqs": 7,
            "block_size": 4,
            "memory_utilization": 0.3,
            "max_num_batched_tokens": 512,
            "num_blocks": 50,
        },
        max_errors=3,
    )

    report = run_job(changed, engine=engine())

    assert report.run.parts_kept == 1
    assert [row["completion"] for row in rows(out)] == [f"[q{i}]" for i in range(12)]
    assert (out / history.JOB).read_bytes() == record


def same_looking(path: pathlib.Path, values: list[str]) -> None:
    """A file of these values, whose statistics say nothing of them."""
    pq.write_table(
        pa.table({"q": values}),
        path,
        compression="none",
        use_dictionary=False,
        write_statistics=False,
    )


def test_other_bytes_in_a_file_that_looks_the_same_are_refused(make_spec, engine, out, tmp_path):
    path = tmp_path / "in" / "rows.parquet"
    path.parent.mkdir()
    same_looking(path, [f"q{i}" for i in range(9)])
    spec = make_spec(input={"prompt_column": "q"}, output={"rows_per_part": 3})
    with pytest.raises(JobInterrupted):
        run_job(spec, engine=engine(), should_stop=StopAfter(1))
    assert 0 < len(parts(out)) < 3
    before, footer = path.stat(), pq.read_metadata(path)

    same_looking(path, [f"x{i}" for i in range(9)])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    assert path.stat().st_size == before.st_size
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert pq.read_metadata(path).equals(footer)
    assert "input file rows.parquet: content 'sha256:" in refusal(spec, out)
    same_looking(path, [f"q{i}" for i in range(9)])
    assert run_job(spec, engine=engine()).output.rows == 9


def test_a_file_that_was_touched_copied_or_moved_passes(half, make_spec, engine, out, tmp_path):
    spec = half()
    path = tmp_path / "in" / "rows.parquet"
    os.utime(path, ns=(1, time.time_ns() - 10**12))
    shutil.copy(path, tmp_path / "copy")
    (tmp_path / "copy").replace(path)
    with pytest.raises(JobInterrupted):
        run_job(spec, engine=engine(), should_stop=StopAfter(0))
    shutil.move(tmp_path / "in", tmp_path / "elsewhere")
    moved = make_spec(
        input={"prompt_column": "q", "path": str(tmp_path / "elsewhere")},
        output={"rows_per_part": 4},
    )

    assert run_job(moved, engine=engine()).output.rows == 12


def test_a_file_that_is_gone_renamed_or_new_is_named(half, write_rows, out, tmp_path):
    spec = half()
    path = tmp_path / "in" / "rows.parquet"

    other = write_rows("new.parquet", q=["x"] * 5)
    assert "input file new.parquet: is new, 5 rows" in refusal(spec, out)
    kept = path.read_bytes()
    path.unlink()
    text = refusal(spec, out)
    assert "input file rows.parquet: 12 rows -> is gone; put it back" in text
    assert "input file new.parquet: is new, 5 rows" in text
    other.unlink()
    path.with_name("renamed.parquet").write_bytes(kept)
    text = refusal(spec, out)
    assert "input file rows.parquet: 12 rows -> is gone; put it back" in text
    assert "input file renamed.parquet: is new, 12 rows" in text


VERIFIES = RunOptions(verifies_weights=True)


@pytest.fixture
def weights(tmp_path) -> pathlib.Path:
    """The weights of a model that is this test's own; `others` lie beside them."""
    model = write_tiny_llama(tmp_path / "model")
    other = write_tiny_llama(tmp_path / "other", seed=1)
    shutil.copy(other / "model.safetensors", model / "others")
    return model / "model.safetensors"


def test_weights_of_the_same_shapes_pass_unless_they_are_verified(half, weights, engine, out):
    spec = half(model=str(weights.parent))
    assert "began without it" in refusal(spec, out, VERIFIES)

    shutil.copy(weights.with_name("others"), weights)

    assert run_job(spec, engine=engine()).state == "finished"
    assert "began without it" in refusal(spec, out, VERIFIES)


def test_verified_weights_are_verified_by_every_later_run(half, weights, engine, out):
    spec = half(VERIFIES, model=str(weights.parent))
    with pytest.raises(JobInterrupted):
        run_job(spec, engine=engine(), should_stop=StopAfter(0), options=VERIFIES)
    known = weights.read_bytes()

    shutil.copy(weights.with_name("others"), weights)
    for options in (None, VERIFIES):
        assert "the model's weights, every byte: '" in refusal(spec, out, options)

    weights.write_bytes(known)
    assert run_job(spec, engine=engine()).state == "finished"
    assert run_job(spec, options=VERIFIES).state == "already finished"
    shutil.copy(weights.with_name("others"), weights)
    assert "the model's weights, every byte: '" in refusal(spec, out)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_text("{"), "job.json cannot be used"),
        (lambda path: path.write_text('{"format": 1}'), "is of format 1, this version"),
        (lambda path: path.unlink(), "is not empty and was not made by jaxpaged"),
    ],
    ids=["garbage", "format", "missing"],
)
def test_a_folder_whose_record_is_no_use_is_refused(half, engine, out, damage, message):
    spec = half()
    damage(out / history.JOB)
    before = folder_stamps.of_all(out)

    with pytest.raises(OutputConflictError, match=message) as caught:
        run_job(spec, engine=engine())
    assert caught.value.exit_code == 6
    assert folder_stamps.of_all(out) == before


@pytest.mark.parametrize("name", ["file", "file/out"])
def test_an_output_that_is_a_file_is_a_user_s_mistake(
    write_rows, make_spec, engine, tmp_path, name
):
    write_rows(q=["a"])
    (tmp_path / "file").write_text("precious")
    spec = make_spec(input={"prompt_column": "q"}, output={"path": str(tmp_path / name)})
    with pytest.raises((ConfigError, OutputConflictError), match=r"output\.path"):
        run_job(spec, engine=engine())
