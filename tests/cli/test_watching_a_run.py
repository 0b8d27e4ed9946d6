"""`--metrics-port` and `--log-format json` of the commands that run jobs."""

import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result
from scrape import fetch
from tiny import write_tiny_llama

from jaxpaged.cli import main

COMMAND = [sys.executable, "-c", "from jaxpaged.cli import main; main()"]
AS_JSON = ("--log-format", "json")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> pathlib.Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


def write_job(folder: pathlib.Path, model: pathlib.Path, *texts: str | None) -> pathlib.Path:
    pq.write_table(pa.table({"q": pa.array(texts, pa.string())}), folder / "rows.parquet")
    path = folder / "job.yaml"
    path.write_text(
        f"model: {model}\n"
        "input: {path: rows.parquet, prompt_column: q}\n"
        "output: {path: out, rows_per_part: 8}\n"
        "sampling: {max_tokens: 4, ignore_eos: true}\n"
        "engine: {max_model_len: 32, num_blocks: 16, max_num_seqs: 2}\n"
    )
    return path


@pytest.fixture
def job(tmp_path, model) -> pathlib.Path:
    """A job of three rows, one of them faulty."""
    return write_job(tmp_path, model, "a", None, "c")


@pytest.fixture
def long_job(tmp_path, model) -> pathlib.Path:
    return write_job(tmp_path, model, *["a"] * 3000)


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def events(result: Result) -> list[dict[str, Any]]:
    """The lines on stderr, every one of which must be JSON with what all lines have."""
    lines = [json.loads(line) for line in result.stderr.splitlines()]
    assert all(list(line)[:3] == ["time", "level", "event"] for line in lines)
    return lines


def test_a_run_is_told_in_json_and_the_summary_stays(job, tmp_path) -> None:
    result = invoke("run", job, *AS_JSON)

    assert result.exit_code == 0, result.stderr
    told = events(result)
    names = [line["event"] for line in told]
    assert names[:4] == ["note", "note", "begin", "progress"]
    # More of progress where compiling takes long.
    assert names[-4:] == ["progress", "warning", "warning", "end"]
    assert told[-2]["message"].startswith("67% of the rows were cut off")
    end = {key: value for key, value in told[-1].items() if key != "time"}
    assert end == {
        "level": "info",
        "event": "end",
        "state": "finished",
        "exit_code": 0,
        "rows": 3,
        "errors": 1,
        "skipped": 0,
        "path": str(tmp_path / "out"),
    }
    assert "3 of 3" in result.stdout

    again = invoke("run", job, *AS_JSON)
    assert again.exit_code == 0
    assert events(again)[-1]["state"] == "already finished"


def test_a_retry_is_told_in_json_too(job, tmp_path) -> None:
    assert invoke("run", job).exit_code == 0

    nothing = invoke("retry", tmp_path / "out", "--where", "q = 'nobody'", *AS_JSON)
    redone = invoke("retry", tmp_path / "out", "--where", "q = 'a'", *AS_JSON)
    wrong = invoke("retry", tmp_path / "out", "--where", "qq = 'a'", *AS_JSON)

    assert (nothing.exit_code, events(nothing)[-1]["state"]) == (0, "nothing to do")
    assert (redone.exit_code, events(redone)[-1]["state"]) == (0, "finished")
    assert (wrong.exit_code, events(wrong)[-1]["state"]) == (2, "failed")


@pytest.mark.parametrize(
    ("override", "code", "state", "message"),
    [
        ("sampling.max_token=1", 2, "failed", "unknown key; did you mean max_tokens?"),
        ("model=missing", 2, "failed", "missing does not exist"),
        ("max_errors=0", 4, "too many row errors", "1 row errors, more than max_errors allows"),
        ("output.path=full", 6, "failed", "was not made by jaxpaged"),
    ],
)
@pytest.mark.parametrize("quiet", [(), ("--quiet",)])
def test_what_ends_a_run_is_told_before_its_end_with_the_same_exit_code(
    job, tmp_path, override, code, state, message, quiet
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("precious")

    in_text = invoke("run", job, "--set", override, *quiet)
    result = invoke("run", job, "--set", override, *AS_JSON, *quiet)

    assert in_text.exit_code == result.exit_code == code
    *before, error, end = events(result)
    assert (error["event"], error["level"]) == ("error", "error")
    assert message in error["message"]
    assert f"error: {error['message']}" in in_text.stderr
    assert (end["event"], end["state"], end["exit_code"]) == ("end", state, code)
    assert not (quiet and before)
    assert result.stdout == ""


def test_quiet_writes_nothing_about_a_run_that_ends_well(job) -> None:
    result = invoke("run", job, "--quiet", *AS_JSON)

    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")


def test_a_bug_is_told_with_its_traceback() -> None:
    script = (
        "import jaxpaged.job.spec\n"
        "jaxpaged.job.spec.JobSpec.from_file = None\n"
        "from jaxpaged.cli import main\n"
        "main(['run', 'job.yaml', '--log-format', 'json'])\n"
    )

    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )

    error, end = (json.loads(line) for line in result.stderr.splitlines())
    assert result.returncode == 1
    assert "a bug in jaxpaged" in error["message"]
    assert "TypeError: 'NoneType' object is not callable" in error["traceback"]
    assert (end["state"], end["exit_code"]) == ("failed", 1)


def read_until(process: subprocess.Popen, pattern: str) -> re.Match[str]:
    """What the process writes to stderr, up to a line with a pattern."""
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if found := re.search(pattern, line):
            return found
    raise AssertionError("".join(seen))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_says_that_it_stopped(long_job, number) -> None:
    command = [*COMMAND, "run", str(long_job), *AS_JSON]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    read_until(process, '"begin"')

    os.kill(process.pid, number)
    told = [json.loads(line) for line in process.communicate(timeout=60)[1].splitlines()]

    assert process.returncode == 128 + number
    assert any(line.get("message", "").startswith("stopping after") for line in told)
    warning, end = told[-2:]
    assert (warning["event"], warning["level"]) == ("warning", "warning")
    assert re.match(r"stopped after [\d,]+ of 3,000 rows", warning["message"])
    assert (end["state"], end["exit_code"]) == ("stopped", 128 + number)


def test_a_running_job_shows_its_metrics_until_it_ends(long_job) -> None:
    command = [*COMMAND, "run", str(long_job), "--metrics-port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    url = read_until(process, r"live metrics at (http://127\.0\.0\.1:\d+/metrics)$")[1]
    deadline = time.monotonic() + 120
    done: list[float] = []

    while len(done) < 3 and time.monotonic() < deadline:
        scrape = fetch(url)
        rows = scrape.by("jaxpaged_rows_total", "finish_reason").get("length", 0.0)
        if rows and rows not in done:
            done.append(rows)
            assert scrape.value("jaxpaged_job_rows") == 3000
            assert scrape.value("jaxpaged_pool_blocks") == 16
    os.kill(process.pid, signal.SIGINT)
    process.communicate(timeout=60)

    assert process.returncode == 130
    assert len(done) == 3
    assert done == sorted(done)
    with pytest.raises(OSError, match="refused"):
        fetch(url)


def test_a_retry_has_metrics_too(job, tmp_path) -> None:
    assert invoke("run", job).exit_code == 0

    result = invoke("retry", tmp_path / "out", "--where", "q = 'a'", "--metrics-port", "0")

    assert result.exit_code == 0
    assert "live metrics at http://127.0.0.1:" in result.stderr


def test_ports_that_cannot_be_are_refused_before_anything_is_done(job, tmp_path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        in_use = invoke("run", job, "--metrics-port", port)
        in_json = invoke("run", job, "--metrics-port", port, *AS_JSON)
    beyond = invoke("run", job, "--metrics-port", 65536)
    alone = invoke("run", job, "--metrics-host", "0.0.0.0")

    assert [one.exit_code for one in (in_use, in_json, beyond, alone)] == [2] * 4
    assert f"error: --metrics-host 127.0.0.1 --metrics-port {port}: cannot" in in_use.stderr
    assert events(in_json)[-1]["exit_code"] == 2
    assert "65536 is not in the range" in beyond.stderr
    assert "--metrics-host shows nothing without --metrics-port" in alone.stderr
    assert not (tmp_path / "out").exists()
