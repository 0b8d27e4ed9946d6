import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import click
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result
from tiny import write_tiny_llama

from jaxpaged import cli
from jaxpaged._version import VERSION
from jaxpaged.cli import main


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> pathlib.Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def job(tmp_path, model) -> pathlib.Path:
    """A job of four rows on a tiny model."""
    pq.write_table(
        pa.table({"q": ["a", "b", None, "d"], "answer": ["x", "y", "z", None]}),
        tmp_path / "rows.parquet",
    )
    path = tmp_path / "job.yaml"
    path.write_text(
        f"model: {model}\n"
        "input: {path: rows.parquet, prompt: 'Q {{ q }}'}\n"
        "output: {path: out, rows_per_part: 3}\n"
        "sampling: {max_tokens: 4}\n"
        "engine: {max_model_len: 32, num_blocks: 16, max_num_seqs: 2}\n"
        "eval: {reference: answer, metrics: [contains]}\n"
    )
    return path


def invoke(*arguments: object) -> Result:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert "Traceback" not in result.output + result.stderr
    return result


def test_a_job_from_end_to_end_and_again(job, tmp_path):
    first = invoke("run", job)

    assert first.exit_code == 0, first.stderr
    assert "4 of 4" in first.stdout
    assert "null_prompt" in first.stdout
    assert "contains" in first.stdout
    assert "rows.parquet, row group 0, row 0" in first.stdout
    assert "KV pool" in first.stderr
    table = pq.read_table(tmp_path / "out")
    assert table["q"].to_pylist() == ["a", "b", None, "d"]
    assert table["completion_tokens"].to_pylist() == [4, 4, 0, 4]
    assert table["error_code"].to_pylist() == [None, None, "null_prompt", None]

    again = invoke("run", job, "--set", f"model={tmp_path / 'gone'}")
    assert again.exit_code == 2
    assert "gone does not exist" in again.stderr
    again = invoke("run", job, "--set", "sampling.max_tokens=5")
    assert again.exit_code == 3
    assert "sampling.max_tokens: 4 -> 5" in again.stderr
    again = invoke("run", job)
    assert again.exit_code == 0
    assert "already finished, nothing to do" in again.stdout
    assert "KV pool" not in again.stderr


def run_process(*arguments: object, **options) -> subprocess.Popen:
    """The command line in a process of its own."""
    command = [sys.executable, "-c", "from jaxpaged.cli import main; main()"]
    return subprocess.Popen(
        [*command, *(str(argument) for argument in arguments)], text=True, **options
    )


def test_a_reader_that_leaves_early_is_no_bug_and_the_job_is_finished(job, tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    process = run_process("run", job, stdout=writer, stderr=writer)
    os.close(writer)

    process.wait(120)

    assert (tmp_path / "out/_SUCCESS").is_file()
    version = run_process("version", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert version.stdout is not None
    version.stdout.close()
    assert version.stderr is not None
    assert "bug" not in version.stderr.read()
    version.stderr.close()
    version.wait(60)


def test_a_terminal_without_unicode_gets_question_marks(job, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    (tmp_path / "rows.parquet").rename(tmp_path / "größe.parquet")
    process = run_process(
        "run",
        job,
        "--set",
        "input.path=größe.parquet",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )

    stdout, stderr = process.communicate(timeout=120)

    assert process.returncode == 0, stderr
    assert "gr??e.parquet" in stdout


def test_an_interrupt_outside_of_a_job_is_130():
    @click.command()
    @cli._ends_well
    def interrupted() -> int:
        raise KeyboardInterrupt

    result = CliRunner().invoke(interrupted)

    assert result.exit_code == 130
    assert "Traceback" not in result.output


def test_a_device_that_is_not_there_is_named(job, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    process = run_process(
        "run",
        job,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )

    _, stderr = process.communicate(timeout=120)

    assert process.returncode == 2
    assert "JAX cannot start its device" in stderr
    assert "Traceback" not in stderr


def test_quiet_prints_nothing(job):
    result = invoke("run", job, "--quiet")

    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")


def test_validate_shows_prompts_without_running(job, tmp_path):
    result = invoke("validate", job, "--rows", "2", "--set", "input.prompt=Hello {{ q }}")

    assert result.exit_code == 0, result.stderr
    assert "'Hello a'" in result.stdout
    assert "8 tokens" in result.stdout
    assert not (tmp_path / "out").exists()


def test_version_names_what_results_depend_on():
    result = invoke("version")

    assert result.exit_code == 0
    assert f"jaxpaged {VERSION}" in result.stdout
    assert f"pyarrow {pa.__version__}" in result.stdout
    assert re.search(r"^jax \d", result.stdout, re.MULTILINE)


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize("command", [[], ["run"], ["validate"], ["version"]])
def test_every_help_has_an_example(command, flag):
    result = invoke(*command, flag)

    assert result.exit_code == 0
    assert "  jaxpaged " in result.stdout
    assert "Example" in result.stdout


def test_every_exit_code_is_documented():
    text = invoke("--help").stdout

    for code in ("0", "1", "2", "3", "4", "5", "6", "130", "143"):
        assert re.search(rf"\b{code}\b", text)


@pytest.mark.parametrize(
    ("overrides", "code", "message"),
    [
        (["sampling.max_token=1"], 2, "unknown key; did you mean max_tokens?"),
        (["input.prompt={{ qq }}"], 2, "the input has no column 'qq'; did you mean 'q'?"),
        (["input.path=missing.parquet"], 2, "missing.parquet does not exist"),
        (["input.path=job.yaml"], 2, "job.yaml: not a Parquet file"),
        (["model=job.yaml"], 2, "error: "),
        (["model=missing"], 2, "missing does not exist"),
        (["output.path=rows.parquet"], 2, "is the input"),
        (["output.path=/proc/none/out"], 2, "output.path: cannot write to /proc/none/out"),
        (["output.path=full"], 6, "full is not empty and was not made by jaxpaged"),
        (["max_errors=0"], 4, "1 row errors, more than max_errors allows (0)"),
        (["engine.max_model_len=100000"], 2, "engine.max_model_len"),
    ],
)
def test_a_user_s_mistake_is_one_message_and_a_documented_code(
    job, tmp_path, overrides, code, message
):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("precious")
    options = [part for override in overrides for part in ("--set", override)]

    result = invoke("run", job, *options)

    assert result.exit_code == code
    assert message in result.stderr
    assert result.stderr.count("error: ") == 1


def test_a_missing_job_file_and_a_missing_argument(tmp_path):
    missing = invoke("run", tmp_path / "no.yaml")
    assert missing.exit_code == 2
    assert "no.yaml: cannot read the job file: No such file or directory" in missing.stderr

    assert invoke("run").exit_code == 2
    assert invoke("runn", "x").exit_code == 2


def test_a_bug_of_ours_says_so():
    script = (
        "import sys\n"
        "import jaxpaged.job.versions\n"
        "del jaxpaged.job.versions.installed\n"
        "from jaxpaged.cli import main\n"
        "main(['version'])\n"
    )

    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )

    assert result.returncode == 1
    assert "Traceback" in result.stderr
    assert f"error: a bug in jaxpaged {VERSION}; please report it" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["run", "--help"], ["version"], ["validate", "JOB"]],
    ids=["help", "run help", "version", "validate"],
)
def test_jax_is_not_loaded_without_need(job, arguments):
    arguments = [str(job) if argument == "JOB" else argument for argument in arguments]
    script = (
        "import sys\n"
        "from jaxpaged.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "sys.exit(str(sorted({'jax', 'jaxlib', 'flax'} & set(sys.modules)) or ''))\n"
    )

    command = [sys.executable, "-c", script, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)

    assert result.stderr == "\n"


def test_ctrl_c_stops_cleanly_and_the_same_command_continues(job, tmp_path):
    pq.write_table(pa.table({"q": ["a"] * 3000, "answer": ["x"] * 3000}), tmp_path / "rows.parquet")
    script = "from jaxpaged.cli import main; main()"
    command = [sys.executable, "-c", script, "run", str(job), "--set", "output.rows_per_part=8"]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not list((tmp_path / "out").glob("*.parquet")) and time.monotonic() < deadline:
        time.sleep(0.01)

    os.kill(running.pid, signal.SIGINT)
    stderr = running.communicate(timeout=60)[1]

    assert running.returncode == 130, stderr
    assert "stopping after this step" in stderr
    assert re.search(r"interrupted: stopped after [\d,]+ of 3,000 rows", stderr)
    assert "Traceback" not in stderr
    done = pq.read_table(tmp_path / "out").num_rows
    assert 0 < done < 3000
    assert done % 8 == 0
    assert not (tmp_path / "out" / "_SUCCESS").exists()
