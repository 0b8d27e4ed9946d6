"""`jaxpaged convert`, and jobs on what it writes."""

import json
import pathlib
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny
from click.testing import CliRunner, Result

from jaxpaged.cli import main
from jaxpaged.model.checkpoint.orbax_index import MARKER


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> pathlib.Path:
    return tiny.write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", dtype="bfloat16")


@pytest.fixture(scope="module")
def converted(model) -> pathlib.Path:
    target = model.with_name("orbax")
    assert invoke("convert", model, target, "--quiet").exit_code == 0
    return target


def invoke(*arguments: object) -> Result:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert "Traceback" not in result.output + result.stderr
    return result


@pytest.fixture
def job(tmp_path) -> pathlib.Path:
    pq.write_table(pa.table({"q": ["the cat", "on the", "mat"]}), tmp_path / "rows.parquet")
    path = tmp_path / "job.yaml"
    path.write_text(
        "model: none\n"
        "input: {path: rows.parquet, messages: [{role: user, content: '{{ q }}'}]}\n"
        "output: {path: out, token_ids: true}\n"
        "sampling: {max_tokens: 6, temperature: 1.0, seed: 3}\n"
        "engine: {max_model_len: 64, num_blocks: 32, max_num_seqs: 1, attention: xla, "
        "max_num_batched_tokens: 64}\n"
    )
    return path


def test_converted_model_completes_as_its_source(job, model, converted, tmp_path):
    tables = {}
    for name, path in (("source", model), ("orbax", converted)):
        change = ("--set", f"model={path}", "--set", f"output.path={name}")
        result = invoke("run", job, *change)
        assert result.exit_code == 0, result.stderr
        tables[name] = pq.read_table(tmp_path / name)
    assert tables["orbax"].equals(tables["source"])
    assert any(tables["orbax"]["completion_tokens"].to_pylist())


@pytest.mark.parametrize("command", ["validate", "plan"])
def test_converted_model_is_looked_at(job, converted, command):
    result = invoke(command, job, "--set", f"model={converted}")
    assert result.exit_code == 0, result.stderr
    assert "rows" in result.stdout


def test_it_tells_how_far_it_is_and_where_it_wrote(model, tmp_path):
    result = invoke("convert", model, tmp_path / "out", "--dtype", "float32")
    assert result.exit_code == 0
    assert result.stdout == f"written: {tmp_path / 'out'}\n"
    assert re.search(r"written lm_head, float32\[272, 32\]: [\d.]+ MiB", result.stderr)
    index = json.loads((tmp_path / "out" / MARKER).read_text())
    assert {array["dtype"] for array in index["arrays"].values()} == {"float32"}


def test_quiet_prints_nothing(model, tmp_path):
    result = invoke("convert", model, tmp_path / "out", "--quiet")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("{model}",), 2, "Missing argument 'DST'"),
        (("{model}", "{new}", "--dtype", "int8"), 2, "'int8' is not one of"),
        (("{here}/none", "{new}"), 2, "does not exist"),
        (("{here}", "{new}"), 2, "config.json is missing"),
        (("hf://tiny", "{new}"), 2, "malformed; expected hf://"),
        (("{model}", "{model}"), 6, "is there already, and nothing is overwritten"),
        (("{model}", "/proc/none/out"), 1, "cannot be written"),
    ],
)
def test_mistakes_end_with_one_message_and_a_documented_code(
    model, tmp_path, arguments, code, message
):
    places = {"model": model, "here": tmp_path, "new": tmp_path / "new"}
    result = invoke("convert", *(argument.format(**places) for argument in arguments))
    assert result.exit_code == code
    assert message in result.stderr
    assert not (tmp_path / "new").exists()
