import json
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
from scripted_engine import ScriptedEngine
from tiny import write_tiny_llama

from jaxpaged._version import VERSION
from jaxpaged.cli import main
from jaxpaged.cli.ending import ends_well
from jaxpaged.job.runner import run_job
from jaxpaged.job.spec import JobSpec
from jaxpaged.model.checkpoint import open_checkpoint

# How a run is shown.
RUNNING = ("--quiet", "--log-format", "--metrics-port", "--metrics-host")


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


def run_scripted(job: pathlib.Path, *overrides: str) -> pathlib.Path:
    """Runs a job with an engine that only echoes; returns where its output is."""
    spec = JobSpec.from_file(job, overrides)
    tokenizer = open_checkpoint(pathlib.Path(spec.model)).tokenizer()
    run_job(spec, engine=ScriptedEngine(tokenizer))
    return pathlib.Path(spec.output.path)


@pytest.fixture
def finished(job) -> pathlib.Path:
    """The output of the job."""
    return run_scripted(job)


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


def test_rows_that_were_cut_are_redone(job, tmp_path, monkeypatch):
    assert invoke("run", job).exit_code == 0
    before = pq.read_table(tmp_path / "out").to_pylist()
    assert [row["finish_reason"] for row in before] == ["length", "length", "error", "length"]
    monkeypatch.chdir(tmp_path)
    where = "finish_reason = 'length' AND q IN ('a', 'd')"

    result = invoke("retry", "out", "--where", where, "--set", "sampling.max_tokens=6")

    assert result.exit_code == 0, result.stderr
    assert "4 of 4" in result.stdout
    assert "KV pool" in result.stderr
    after = pq.read_table(tmp_path / "out").to_pylist()
    assert [after[1], after[2]] == [before[1], before[2]]
    assert [after[i]["completion_tokens"] for i in (0, 3)] == [6, 6]
    for i in (0, 3):
        # Greedy: the longer completion begins with the shorter one.
        assert after[i]["completion"].startswith(before[i]["completion"].rstrip("\ufffd"))
    assert "already finished" in invoke("run", job).stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--where", "q = 'nobody'"], 0, ""),
        ([], 2, "--where: is missing"),
        (["--where", "qq = 'a'"], 2, "did you mean 'q'?"),
        (["--where", "q = 'a'", "--set", "output.prompt=true"], 2, "cannot change in a retry"),
        (["--where", "q = 'a'", "--set", "sampling.max_tokens"], 2, "expected key=value"),
        (["--where", "q = 'a'", "--storage", "s3.regin=x"], 2, "did you mean region?"),
    ],
)
def test_a_retry_that_redoes_nothing_ends_with_a_documented_code(
    finished, arguments, code, message
):
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}

    result = invoke("retry", finished, *arguments)

    assert result.exit_code == code, result.stderr
    assert message in result.stderr
    assert result.stderr.count("error: ") == (code != 0)
    assert ("no row is chosen, nothing to do" in result.stdout) == (code == 0)
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")} == before


def test_a_retry_of_what_is_no_finished_job_is_refused(finished, tmp_path):
    for place in (tmp_path / "none", tmp_path):
        result = invoke("retry", place, "--where", "q = 'a'")
        assert result.exit_code == 6
        assert str(place) in result.stderr

    (finished / "_SUCCESS").unlink()
    next((finished / "_jaxpaged" / "commits").iterdir()).unlink()
    result = invoke("retry", finished, "--where", "q = 'a'")
    assert result.exit_code == 6
    assert "the job is not finished" in result.stderr


def test_new_input_files_are_taken_in_where_that_is_wanted(job, tmp_path):
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows.parquet").rename(tmp_path / "rows" / "m.parquet")
    run_scripted(job, "input.path=rows")
    more = pa.table(
        {"q": [None], "answer": ["x"]}, schema=pq.read_schema(tmp_path / "rows/m.parquet")
    )
    pq.write_table(more, tmp_path / "rows" / "a.parquet")
    words = ["run", job, "--set", "input.path=rows"]

    refused = invoke(*words)
    taken = invoke(*words, "--extend")

    assert refused.exit_code == 3
    assert "input file a.parquet: is new, 1 rows" in refused.stderr
    assert "`jaxpaged run JOB --extend` takes new input files in" in refused.stderr
    assert taken.exit_code == 0, taken.stderr
    assert "5 of 5" in taken.stdout
    assert pq.read_table(tmp_path / "out")["q"].to_pylist() == ["a", "b", None, "d", None]


def test_a_damaged_part_is_told_of_and_repaired(job, finished):
    whole = (finished / "part-000000.parquet").read_bytes()
    (finished / "part-000001.parquet").unlink()

    verified = invoke("verify", finished, "--json")
    refused = invoke("run", job)
    repaired = invoke("run", job, "--repair")

    assert verified.exit_code == refused.exit_code == 6
    assert [problem["unit"] for problem in json.loads(verified.stdout)["problems"]] == [1]
    assert "`jaxpaged run JOB --repair`" in refused.stderr
    assert repaired.exit_code == 0, repaired.stderr
    assert "part-000001.parquet does not verify; its rows are made again" in repaired.stderr
    assert (finished / "part-000000.parquet").read_bytes() == whole
    assert pq.read_table(finished)["q"].to_pylist() == ["a", "b", None, "d"]
    assert invoke("verify", finished, "--json").exit_code == 0


def test_weights_are_verified_from_the_beginning_or_not_at_all(job, finished):
    result = invoke("run", job, "--verify-weights")

    assert result.exit_code == 3
    assert "--verify-weights: this job began without it" in result.stderr


def test_what_a_folder_holds_is_told_as_json(job, finished, tmp_path):
    other = run_scripted(job, f"output.path={tmp_path / 'other'}", "sampling.max_tokens=2")

    commands = {
        "status": (["status", finished], 0),
        "verify": (["verify", finished], 0),
        "same": (["diff", finished, finished], 0),
        "changed": (["diff", finished, other], 1),
        "compared": (["compare", finished, other], 0),
    }

    for name, (words, code) in commands.items():
        told = invoke(*words, "--json")
        shown = invoke(*words)
        assert (told.exit_code, shown.exit_code) == (code, code), (name, told.stderr, shown.stderr)
        assert isinstance(json.loads(told.stdout), dict)
        assert shown.stdout.strip()
        assert told.stderr == shown.stderr == ""


def test_a_report_is_made_again(finished, tmp_path):
    page = finished / "_jaxpaged" / "report.html"
    page.unlink()

    elsewhere = invoke("report", finished, "--html", tmp_path / "page.html")
    assert not page.exists()
    again = invoke("report", finished)

    assert (elsewhere.exit_code, again.exit_code) == (0, 0), again.stderr
    assert page.read_text().startswith("<!doctype html>")
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    assert str(page) in again.stdout
    assert "4 of 4" in again.stdout


def test_a_report_without_matplotlib_names_what_to_install(finished, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = invoke("report", finished)
    assert result.exit_code == 2
    assert "pip install 'jaxpaged[report]'" in result.stderr


@pytest.mark.parametrize(
    "words",
    [["verify", "OUT"], ["diff", "OUT", "OUT"], ["compare", "OUT", "OUT"], ["report", "OUT"]],
    ids=" ".join,
)
def test_a_folder_of_no_job_is_refused(words, tmp_path):
    result = invoke(*(tmp_path if word == "OUT" else word for word in words))

    assert result.exit_code == 6
    assert str(tmp_path) in result.stderr
    assert list(tmp_path.iterdir()) == []


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
    @ends_well
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
@pytest.mark.parametrize("command", [[], *([name] for name in sorted(main.commands))])
def test_every_help_has_an_example(command, flag):
    result = invoke(*command, flag)

    assert result.exit_code == 0
    assert re.search(rf"^ +jaxpaged {' '.join(command) or 'run'}\b", result.stdout, re.MULTILINE)
    assert "Example" in result.stdout


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("run", ["--set", "--extend", "--repair", "--verify-weights", *RUNNING]),
        ("retry", ["--where", "--set", "--storage", *RUNNING]),
        ("status", ["--storage", "--json"]),
        ("verify", ["--storage", "--json"]),
        ("diff", ["--storage", "--json"]),
        ("report", ["--storage", "--html"]),
        ("compare", ["--storage", "--json"]),
    ],
)
def test_every_option_is_in_the_help(command, options):
    text = invoke(command, "--help").stdout

    assert [
        option for option in options if not re.search(rf"^  {option} ", text, re.MULTILINE)
    ] == []


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
    [
        ["--help"],
        ["run", "--help"],
        ["retry", "--help"],
        ["version"],
        ["schema"],
        ["validate", "JOB"],
        ["run", "JOB", "--quiet"],
        ["retry", "OUT", "--where", "q = 'not there'"],
        ["status", "OUT", "--json"],
        ["verify", "OUT", "--json"],
        ["diff", "OUT", "OUT", "--json"],
        ["compare", "OUT", "OUT", "--json"],
    ],
    ids=" ".join,
)
def test_jax_is_not_loaded_without_need(job, finished, arguments):
    places = {"JOB": str(job), "OUT": str(finished)}
    arguments = [places.get(argument, argument) for argument in arguments]
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
        assert running.poll() is None, running.communicate()[1]
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
