"""Adapters in the job file: which row gets which, what is counted, and what makes another job."""

import io
import json
import pathlib
import shutil
from collections.abc import Callable

import duckdb
import pyarrow as pa
import pytest
import rich.console
from click.testing import CliRunner
from job_output import rows
from tiny_adapter import merge, write_tiny_adapter

from jaxpaged import Engine, EngineConfig, SamplingParams
from jaxpaged.cli import main
from jaxpaged.engine.engine import load_model
from jaxpaged.errors import CheckpointError, ConfigError, IdentityError, InputSchemaError
from jaxpaged.job import rebuilt_report, report_table, validate
from jaxpaged.job.adapter_choice import AdapterChoice
from jaxpaged.job.html import result_blocks
from jaxpaged.job.planned_job import open_output
from jaxpaged.job.report import JobReport
from jaxpaged.job.retry import retry_job
from jaxpaged.job.runner import run_job
from jaxpaged.job.spec import JobSpec
from jaxpaged.job.tally import AdapterCount
from jaxpaged.plan import job_plan
from jaxpaged.plan.job_plan import PlanOptions
from jaxpaged.request import Request
from jaxpaged.stress import check, sweep
from jaxpaged.stress.sweep import StressOptions
from jaxpaged.stress.workload import LenRange, Shape


@pytest.fixture(scope="session")
def folders(model, tmp_path_factory) -> dict[str, pathlib.Path]:
    """Two adapters of the tiny model, of different ranks; nobody changes them."""
    place = tmp_path_factory.mktemp("adapters")
    return {
        "sql": write_tiny_adapter(place / "sql", model, rank=4, seed=1),
        "chat": write_tiny_adapter(place / "chat", model, rank=7, seed=2, targets=("v_proj",)),
    }


@pytest.fixture
def tuned_spec(make_spec, folders) -> Callable[..., JobSpec]:
    """A job with both adapters, chosen by column `task`; sections are merged by key."""

    def make(**sections) -> JobSpec:
        chosen = {} if "adapter" in sections else {"adapter_column": "task"}
        paths = {name: str(path) for name, path in folders.items()}
        return make_spec(**{"input": {"prompt_column": "q"}, "adapters": paths} | chosen | sections)

    return make


def asked(double) -> list[str | None]:
    ordered = sorted(double.requests, key=lambda request: request.request_id)
    return [request.adapter for request in ordered]


def test_each_row_gets_the_adapter_its_cell_names(write_rows, tuned_spec, engine, out) -> None:
    write_rows(q=list("abcde"), task=["sql", None, "chat", "", "sql"])
    double = engine()

    report = run_job(tuned_spec(), engine=double)

    assert asked(double) == ["sql", None, "chat", None, "sql"]
    assert report.num_errors == 0
    assert [row["task"] for row in rows(out)] == ["sql", None, "chat", "", "sql"]


@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())],
)
def test_names_come_from_text_of_any_layout(write_rows, tuned_spec, engine, kind) -> None:
    task = pa.array(["chat", None, "sql"])
    write_rows(
        q=list("abc"), task=task.dictionary_encode() if "dict" in str(kind) else task.cast(kind)
    )
    double = engine()

    report = run_job(tuned_spec(), engine=double)

    assert asked(double) == ["chat", None, "sql"]
    assert set(report.output.adapters) == {"(base)", "chat", "sql"}


def test_one_adapter_for_all_rows(write_rows, tuned_spec, engine) -> None:
    write_rows(q=["a", "bb"])
    double = engine()

    report = run_job(tuned_spec(adapter="chat"), engine=double)

    assert asked(double) == ["chat", "chat"]
    # A token in front of each prompt, one for each character of "[a]" and "[bb]".
    assert report.output.adapters == {
        "chat": AdapterCount(rows=2, prompt_tokens=5, completion_tokens=7)
    }


def test_an_unknown_name_is_a_row_error_that_names_the_known_ones(
    write_rows, tuned_spec, engine, out
) -> None:
    write_rows(q=list("abc"), task=["sql", "sqll", "x" * 100])
    double = engine()

    report = run_job(tuned_spec(), engine=double)

    assert asked(double) == ["sql"]
    found = rows(out)
    assert [row["error_code"] for row in found] == [None, "unknown_adapter", "unknown_adapter"]
    assert found[1]["error_message"] == (
        "column 'task': no adapter 'sqll'; the job has: 'sql', 'chat'"
    )
    assert "x" * 41 not in found[2]["error_message"]
    assert report.output.adapters["(unknown)"].rows == 2
    assert report.output.adapters["sql"].rows == 1


def test_rows_and_tokens_are_counted_by_adapter(write_rows, tuned_spec, engine, out) -> None:
    write_rows(q=["aa", "b", None, "cccc", "d"], task=["sql", None, "sql", "chat", "sql"])
    spec = tuned_spec(output={"rows_per_part": 2})

    report = run_job(spec, engine=engine())

    assert report.output.adapters == {
        "(base)": AdapterCount(rows=1, prompt_tokens=2, completion_tokens=3),
        "chat": AdapterCount(rows=1, prompt_tokens=5, completion_tokens=6),
        "sql": AdapterCount(rows=3, prompt_tokens=5, completion_tokens=7),
    }
    written = json.loads((out / "_jaxpaged/report.json").read_text())
    assert written["output"]["adapters"]["chat"] == {
        "rows": 1,
        "prompt_tokens": 5,
        "completion_tokens": 6,
    }
    # A resumed run and a report made anew count the same from commit records.
    assert run_job(spec, engine=engine()).output.adapters == report.output.adapters
    assert rebuilt_report.rebuild(open_output(spec)).output.adapters == report.output.adapters
    assert _shown(report).count("adapter") >= 3
    tables = [table for block in result_blocks.outcomes(report) for table in block.tables]
    assert ("chat", "1", "5", "6") in tables[-1].rows


def _shown(report: JobReport) -> str:
    console = rich.console.Console(file=io.StringIO(), width=200)
    report_table.show(report, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_several_completions_of_a_row_count_once(write_rows, tuned_spec, engine) -> None:
    write_rows(q=["aa", "b"], task=["sql", None])
    spec = tuned_spec(
        sampling={"n": 3, "temperature": 1.0}, output={"explode": True, "rows_per_part": 1}
    )

    report = run_job(spec, engine=engine())

    counts = report.output.adapters
    assert {name: count.rows for name, count in counts.items()} == {"sql": 1, "(base)": 1}
    assert counts["sql"].prompt_tokens == 3
    assert sum(count.completion_tokens for count in counts.values()) == (
        report.output.completion_tokens
    )


def test_a_job_without_adapters_says_nothing_of_them(write_rows, make_spec, engine, out) -> None:
    write_rows(q=["a"])

    report = run_job(make_spec(input={"prompt_column": "q"}), engine=engine())

    assert report.output.adapters == {}
    assert "adapter " not in _shown(report)
    known = json.loads((out / "_jaxpaged/job.json").read_text())
    assert not [name for name in known["model"] if "adapter" in name]


WRONG = [
    ({"adapter": "sql"}, "adapter: no adapter 'sql'; adapters has: none"),
    ({"adapter_column": "task"}, "adapter_column: adapters is missing"),
    ({"adapters": {"a": "x"}}, r"adapters: no row would use them; name one as adapter \('a'\)"),
    ({"adapters": {"a": "x"}, "adapter": "b"}, "no adapter 'b'; adapters has: 'a'"),
    ({"adapters": {"a": "x"}, "adapter": ""}, "no adapter ''"),
    (
        {"adapters": {"a": "x"}, "adapter": "a", "adapter_column": "task"},
        "adapter and adapter_column exclude each other",
    ),
    ({"adapters": {"(base)": "x"}, "adapter": "(base)"}, r"adapters: .* called '\(base\)'"),
    ({"adapters": {"a\nb": "x"}, "adapter": "a\nb"}, r"adapters: .* called 'a\\nb'"),
    ({"adapters": {"": "x"}, "adapter_column": "c"}, "adapters.*: expected text that is not empty"),
    ({"adapters": {"a": ""}, "adapter": "a"}, "adapters.a: expected text that is not empty"),
    ({"adapters": {"a": 5}, "adapter": "a"}, "adapters.a: expected text, found 5"),
    ({"adapters": ["x"], "adapter": "a"}, "adapters: .*"),
]


@pytest.mark.parametrize(("keys", "message"), WRONG)
def test_keys_that_do_not_go_together_are_refused(make_spec, keys, message) -> None:
    with pytest.raises(ConfigError, match=message):
        make_spec(input={"prompt_column": "q"}, **keys)


def test_no_adapters_are_none(make_spec) -> None:
    for empty in (None, {}):
        spec = make_spec(input={"prompt_column": "q"}, adapters=empty)
        assert spec.adapters is None
        assert spec.adapter_choice() is None


def test_folders_are_relative_to_the_job_file(tmp_path, model) -> None:
    job = {
        "model": str(model),
        "input": {"path": "in", "prompt_column": "q"},
        "output": {"path": "out"},
        "adapters": {"a": "tuned/a", "b": "/else/where"},
        "adapter": "a",
    }
    spec = JobSpec.from_dict(job, tmp_path)
    assert spec.adapters == {"a": str(tmp_path / "tuned/a"), "b": "/else/where"}
    assert spec.adapter_choice() == AdapterChoice(names=("a", "b"), fixed="a")


def test_the_column_must_be_there_be_text_and_be_carried(write_rows, tuned_spec, engine) -> None:
    write_rows(q=["a"], number=[3], task=["sql"])
    for changes, message in (
        ({"adapter_column": "tasks"}, "adapter_column: .* no column 'tasks'; did you mean 'task'"),
        ({"adapter_column": "number"}, "adapter_column: column 'number' must be text"),
        (
            {"input": {"prompt_column": "q", "columns": ["q"]}},
            "adapter_column: column 'task' is not carried; add it to input.columns",
        ),
    ):
        with pytest.raises(InputSchemaError, match=message):
            run_job(tuned_spec(**changes), engine=engine())
    report = run_job(tuned_spec(), engine=engine())
    assert any("number" in note and "task" not in note for note in report.notes)


def test_a_changed_adapter_is_another_job(
    write_rows, tuned_spec, engine, folders, model, tmp_path
) -> None:
    write_rows(q=list("abc"), task=["sql", None, "chat"])
    paths = {
        name: str(shutil.copytree(folder, tmp_path / name)) for name, folder in folders.items()
    }
    run_job(tuned_spec(adapters=paths), engine=engine())
    weights = tmp_path / "sql" / "adapter_model.safetensors"
    content = bytearray(weights.read_bytes())
    before = bytes(content)
    content[-1] ^= 1
    weights.write_bytes(content)

    with pytest.raises(IdentityError, match=r"\n  the model's adapter sql: '[0-9a-f]{64}' -> '"):
        run_job(tuned_spec(adapters=paths), engine=engine())

    weights.write_bytes(before)
    for changes, message in (
        ({"adapters": {"chat": paths["chat"]}}, r"the model's adapter sql: '.*' -> none"),
        ({"adapters": paths, "adapter": "sql"}, "adapter_column: 'task' -> none"),
    ):
        with pytest.raises(IdentityError, match=message):
            run_job(tuned_spec(**changes), engine=engine())
    assert run_job(tuned_spec(adapters=paths), engine=engine()).state == "already finished"


def test_a_retry_uses_the_rows_adapters_again(write_rows, tuned_spec, engine, out) -> None:
    write_rows(q=["aa", "bbb", "c"], task=["sql", None, "chat"])
    report = run_job(tuned_spec(), engine=engine())
    double = engine(answer=lambda text: text)

    again = retry_job(str(out), where="task = 'chat' OR q = 'bbb'", engine=double)

    assert again is not None
    assert asked(double) == [None, "chat"]
    assert [row["completion"] for row in rows(out)] == ["[aa]", "bbb", "c"]
    new, old = again.output.adapters, report.output.adapters
    assert new["sql"] == old["sql"]
    assert new["chat"].completion_tokens == old["chat"].completion_tokens - 2
    with pytest.raises(ConfigError, match="--set adapter: cannot change in a retry"):
        retry_job(str(out), where="q = 'aa'", settings=["adapter=sql"], engine=engine())


def test_what_is_wrong_with_an_adapter_is_found_before_anything_runs(
    write_rows, tuned_spec, folders, tmp_path, out
) -> None:
    write_rows(q=["a"], task=["sql"])
    bad = tmp_path / "bad"
    shutil.copytree(folders["sql"], bad)
    config = json.loads((bad / "adapter_config.json").read_text())
    (bad / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    for paths, error, message in (
        ({"sql": str(bad)}, CheckpointError, "use_dora is True: DoRA"),
        ({"sql": str(tmp_path / "x")}, ConfigError, r"adapters\.sql: .*x' is not a folder"),
    ):
        for command in (run_job, lambda spec: validate.validate(spec, 1)):
            with pytest.raises(error, match=message):
                command(tuned_spec(adapters=paths))
    assert not out.exists()


def test_the_command_line_runs_rows_of_three_kinds(
    write_rows, tmp_path, model, folders, out
) -> None:
    """From a Parquet file to a report: each row as the engine alone with its adapter gives it."""
    texts = [f"row number {index}" for index in range(12)]
    tasks = [[None, "sql", "chat", "", "sqll"][index % 5] for index in range(12)]
    write_rows(q=texts, task=tasks)
    job = tmp_path / "job.yaml"
    shutil.copytree(folders["sql"], tmp_path / "tuned" / "sql")
    job.write_text(
        f"model: {model}\n"
        "input: {path: in, prompt_column: q}\n"
        "output: {path: out, rows_per_part: 5}\n"
        f"adapters:\n  sql: ./tuned/sql\n  chat: {folders['chat']}\n"
        "adapter_column: task\n"
        "sampling: {max_tokens: 6, ignore_eos: true}\n"
        "engine: {max_model_len: 64, num_blocks: 32, max_num_seqs: 4}\n"
    )

    for command in (["validate", "--rows", "12"], ["plan"]):
        result = CliRunner().invoke(main, [*command, str(job)])
        assert result.exit_code == 0, result.output
        assert "unknown_adapter" in result.output
    result = CliRunner().invoke(main, ["run", str(job)])

    assert result.exit_code == 0, result.output
    found = rows(out)
    assert [row["error_code"] for row in found] == [
        "unknown_adapter" if task == "sqll" else None for task in tasks
    ]
    config = EngineConfig(max_model_len=64, num_blocks=32, max_num_seqs=4)
    models = {None: model} | {
        name: merge(tmp_path / f"merged-{name}", model, folder) for name, folder in folders.items()
    }
    sampling = SamplingParams(max_tokens=6, ignore_eos=True)
    texts_of = {}
    for name, folder in models.items():
        engine = Engine.load(folder, config)
        texts_of[name] = [one.text for one in engine.generate(texts, sampling)]
    for index, task in enumerate(tasks):
        if task != "sqll":
            assert found[index]["completion"] == texts_of[task or None][index]
    assert texts_of[None] != texts_of["sql"] != texts_of["chat"] != texts_of[None]
    with duckdb.connect() as connection:
        query = (
            "select coalesce(nullif(task, ''), '(base)'), count(*), sum(completion_tokens) "
            f"from '{out}/*.parquet' where error_code is null group by 1 order by 1"
        )
        counted = connection.execute(query).fetchall()
    written = json.loads((out / "_jaxpaged/report.json").read_text())["output"]["adapters"]
    assert counted == [
        (name, count["rows"], count["completion_tokens"])
        for name, count in written.items()
        if name != "(unknown)"
    ]
    assert written["(unknown)"]["rows"] == tasks.count("sqll")
    again = CliRunner().invoke(main, ["run", str(job)])
    assert "already finished" in again.output


def test_a_plan_counts_adapters_and_has_the_schedule_of_the_run(write_rows, tuned_spec) -> None:
    # The same beginning for all: shared within an adapter, and not between them.
    texts = ["the same beginning, " + "x" * (index % 7) for index in range(24)]
    write_rows(q=texts, task=[[None, "sql", "chat"][index % 3] for index in range(24)])
    settings = {
        "sampling": {"max_tokens": 5, "ignore_eos": True},
        "engine": {
            "max_model_len": 64,
            "max_num_seqs": 4,
            "num_blocks": 40,
            "block_size": 4,
            "preemption": "recompute",
        },
    }
    spec = tuned_spec(**settings)

    plan = job_plan.make(spec, PlanOptions())
    report = run_job(spec)

    ran, planned = report.run.engine, plan.paged
    assert planned is not None
    assert (planned.steps, planned.cached_tokens) == (ran["steps"], ran["cached_tokens"])
    bare = tuned_spec(**settings).model_copy(update={"adapters": None, "adapter_column": None})
    without = job_plan.make(bare, PlanOptions())
    assert plan.memory is not None
    assert without.memory is not None
    assert without.paged is not None
    assert 0 < ran["cached_tokens"] < without.paged.cached_tokens
    # Seven maps of rank 4 and one of 4 + 7 are 16 wide; 2 layers, float32.
    widths = (32 + 32, 32 + 16, 32 + 16, 32 + 32, 32 + 64, 32 + 64, 64 + 32)
    assert plan.memory.weights_bytes - without.memory.weights_bytes == 4 * 2 * 16 * sum(widths)
    assert without.survey.shared_tokens > plan.survey.shared_tokens
    assert (plan.survey.duplicates, without.survey.duplicates) == (3, 17)


def test_a_load_test_takes_adapters_in_turn_and_checks_them(tuned_spec, folders) -> None:
    spec = tuned_spec(engine={"max_model_len": 64, "block_size": 4})
    shape = Shape(prompts=(LenRange(least=2, most=20),), new_tokens=LenRange(least=2, most=6))
    options = StressOptions(shape=shape, requests=9, concurrency=(4,), is_compared=False, checked=9)
    report = sweep.stress(spec, options)
    assert report.check is not None
    assert report.check.requests == 9
    assert report.check.largest_gap < 1e-3
    assert not report.is_failed


def test_the_check_would_see_a_wrong_adapter(tuned_spec, folders, model, tmp_path) -> None:
    """Completions of the model as it is are not those of an adapter."""
    sql = {"sql": str(folders["sql"])}
    engine = Engine.load(model, EngineConfig(max_model_len=64, num_blocks=32), adapters=sql)
    (found,) = engine.generate(["some text"], SamplingParams(max_tokens=8))
    decoder, tokenizer, _ = load_model(model, EngineConfig(max_model_len=64), sql)
    ids = tuple(tokenizer.encode("some text"))
    judged = {
        name: check.check(
            decoder, "float32", [(Request(request_id=0, prompt_ids=ids, adapter=name), found)]
        ).is_good
        for name in (None, "sql")
    }
    assert judged == {None: True, "sql": False}
