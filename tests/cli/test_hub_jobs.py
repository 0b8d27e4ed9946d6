"""Jobs on models of the Hugging Face hub: which commit a job is of, and that it stays so."""

import json
import pathlib
import subprocess
import sys

import fake_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny

import jaxpaged


@pytest.fixture
def job(tmp_path) -> pathlib.Path:
    pq.write_table(pa.table({"q": ["a", "b"]}), tmp_path / "rows.parquet")
    path = tmp_path / "job.yaml"
    path.write_text(
        "model: hf://org/tiny\n"
        "input: {path: rows.parquet, prompt: 'Q {{ q }}'}\n"
        "output: {path: out}\n"
        "sampling: {max_tokens: 4, ignore_eos: true}\n"
        "engine: {max_model_len: 32, num_blocks: 16, max_num_seqs: 2}\n"
    )
    return path


def jaxpaged_cli(*arguments: object) -> subprocess.CompletedProcess:
    """The command line in a process of its own: the library reads its environment once."""
    code = "from jaxpaged.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=pathlib.Path(jaxpaged.__file__).parents[1],
    )


def test_job_is_of_the_commit_it_began_with(job, tmp_path, monkeypatch):
    folder = tiny.write_tiny_llama(tmp_path / "tiny")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    with fake_hub.FakeHub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        first = hub.commit("org/tiny", files)

        looked = jaxpaged_cli("validate", job)
        assert looked.returncode == 0, looked.stderr
        ran = jaxpaged_cli("run", job)
        assert ran.returncode == 0, ran.stderr
        assert (
            f"names no commit and may be another model tomorrow; it is hf://org/tiny@{first}"
            in (ran.stderr)
        )
        record = json.loads((tmp_path / "out" / "_jaxpaged" / "job.json").read_text())
        assert record["result_keys"]["model"] == f"hf://org/tiny@{first}"
        report = json.loads((tmp_path / "out" / "_jaxpaged" / "report.json").read_text())
        assert f"hf://org/tiny@{first}" in json.dumps(report)

        # The branch moves to a commit whose weights look the same.
        second = hub.commit("org/tiny", files | {"special_tokens_map.json": b"{}"})
        moved = jaxpaged_cli("run", job)
        assert moved.returncode == 3
        assert f"model: 'hf://org/tiny@{first}' -> 'hf://org/tiny@{second}'" in moved.stderr

    # Nobody answers any more, and the commit is cached.
    pinned = jaxpaged_cli("run", job, "--set", f"model=hf://org/tiny@{first}")
    assert pinned.returncode == 0, pinned.stderr
    assert "already finished" in pinned.stdout
    redone = jaxpaged_cli(
        "retry", tmp_path / "out", "--where", "q = 'a'", "--set", "sampling.max_tokens=6"
    )
    assert redone.returncode == 0, redone.stderr
    counts = pq.read_table(tmp_path / "out")["completion_tokens"].to_pylist()
    assert counts == [6, 4]
    other = jaxpaged_cli("validate", job, "--set", "model=hf://org/other")
    assert other.returncode == 2
    assert "connect to the network" in other.stderr
