"""The JSON Schema of job files: true to `JobSpec`, complete, and the one in the repository."""

import json
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner

from jaxpaged.cli import main
from jaxpaged.config import DEFAULT_MAX_MODEL_LEN, EngineConfig
from jaxpaged.errors import ConfigError
from jaxpaged.job import schema, yaml_file
from jaxpaged.job.spec import JobSpec
from jaxpaged.request import SamplingParams

ROOT = pathlib.Path(__file__).parents[2]
COMMITTED = ROOT / "jobs/job.schema.json"

JOB = {"model": "m", "input": {"path": "a", "prompt": "b"}, "output": {"path": "c"}}


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    found = schema.job_schema()
    jsonschema.Draft202012Validator.check_schema(found)
    return jsonschema.Draft202012Validator(found)


def with_text(text: str) -> dict[str, Any]:
    """The job and more lines of its file."""
    more = yaml_file.parse(text, "test").value
    assert isinstance(more, dict)
    return JOB | more


def is_a_job(job: dict[str, Any]) -> bool:
    try:
        JobSpec.from_dict(job)
    except ConfigError:
        return False
    return True


def objects(node: object) -> Iterator[dict[str, Any]]:
    """Every group of keys in a schema."""
    if isinstance(node, dict):
        if node.get("type") == "object":
            yield node
        for child in node.values():
            yield from objects(child)


def test_the_committed_schema_is_the_one_that_the_command_prints():
    result = CliRunner().invoke(main, ["schema"])

    assert result.exit_code == 0
    printed = json.loads(result.stdout)
    assert json.loads(COMMITTED.read_text()) == printed, (
        "write it anew: jaxpaged schema > jobs/job.schema.json"
    )
    assert printed["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert printed["title"] == schema.TITLE


@pytest.mark.parametrize("name", ["eval.yaml", "generate.yaml"])
def test_a_sample_job_is_valid_and_names_the_schema(validator, name):
    path = ROOT / "jobs" / name
    first_line = path.read_text().splitlines()[0]

    validator.validate(yaml_file.load(path).value)

    assert first_line == f"# yaml-language-server: $schema={COMMITTED.name}"


def test_the_job_file_in_the_readme_is_valid(validator):
    text = re.search(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert text is not None
    validator.validate(yaml_file.parse(text[1], "README").value)


def test_every_key_is_described_in_the_words_of_a_job_file(validator):
    groups = list(objects(validator.schema))
    sections = [group for group in groups if "properties" in group]
    keys = [(name, key) for group in sections for name, key in group["properties"].items()]

    assert [name for name, key in keys if not key.get("description")] == []
    assert [name for name, key in keys if re.search(r"\bNone\b", key["description"])] == []
    assert {name for name, _ in keys} >= {*JobSpec.model_fields, "content", "region", "top_k"}


def test_no_group_of_keys_takes_unknown_ones(validator):
    groups = list(objects(validator.schema))

    assert len(groups) == 1 + len(validator.schema["$defs"])
    assert all(group["additionalProperties"] is False for group in groups)


def test_ranges_defaults_and_choices_are_those_of_the_job(validator):
    sections = validator.schema["$defs"]
    sampling, engine = (sections[name]["properties"] for name in ("SamplingSpec", "EngineSpec"))

    for owner, keys in ((SamplingParams, sampling), (EngineConfig, engine)):
        for name in owner.RANGES.keys() & keys.keys():
            assert owner.RANGES[name].json_schema().items() <= keys[name].items()
            assert keys[name]["default"] == owner.__dataclass_fields__[name].default
    assert engine["kv_dtype"]["enum"][-2:] == ["int4", None]
    assert sampling["early_stopping"]["enum"] == [True, False, "never"]
    assert f"or {DEFAULT_MAX_MODEL_LEN} if" in engine["max_model_len"]["description"]


RIGHT = [
    "seed: 9223372036854775807",
    "max_errors: 0",
    "max_errors: 5%",
    "max_errors: 0.5%",
    "max_errors: null",
    "input: {path: [a, 's3://b/*.parquet'], prompt_column: q}",
    "input: {path: a, messages: [{role: user, content: x}], columns: []}",
    "input: {path: a, prompt: null, prompt_column: q, on_too_long: truncate_left}",
    "sampling:",
    "sampling: {columns: }",
    "sampling: {columns: {top_p: p}, stop: x, stop_token_ids: 3, bad_words: [x, y]}",
    "sampling: {stop: null, stop_token_ids: [], bad_words: null, logit_bias: null}",
    "sampling: {logit_bias: {50: -5, 60: -inf, 0: 1e4}}",
    "sampling: {temperature: 1, top_k: -1, max_tokens: null, seed: 3, n: 2, best_of: 2}",
    "sampling: {beam_width: 16, n: 2, early_stopping: never, length_penalty: -100}",
    "engine:",
    "engine: {dtype: null, kv_dtype: int4, memory_utilization: 1, swap_space: 0}",
    "storage:",
    "storage: {s3: , gs: {project: p, token: '${ENV:TOKEN}'}}",
    "storage: {s3: {key: '${ENV:A}', secret: '${ENV:B}', endpoint_url: 'http://127.0.0.1:9'}}",
    "eval:",
    "{adapters: {sql: ./sql, chat: ../chat}, adapter: sql}",
    "{adapters: {sql: ./sql}, adapter_column: task}",
    "{adapters: null, adapter: null, adapter_column: null}",
    "eval: {reference: a, metrics: [contains, regex_match], by: c}",
    "output: {path: o, journal_interval: 0, durability: process, explode: true}",
]


@pytest.mark.parametrize("text", RIGHT)
def test_what_is_a_job_is_valid(validator, text):
    job = with_text(text)

    assert is_a_job(job)
    assert [error.message for error in validator.iter_errors(job)] == []


WRONG = [
    "sede: 1",
    "{adapters: {sql: 5}, adapter: sql}",
    "{adapters: {sql: ''}, adapter: sql}",
    "{adapters: [sql], adapter: sql}",
    "seed: 1.5",
    "seed: -1",
    "seed: true",
    "model: ''",
    "model: 5",
    "max_errors: many",
    "max_errors: -1",
    "input: {path: a, prompt: x, prompt_column: q}",
    "input: {path: a}",
    "input: {path: a, prompt: null}",
    "input: {prompt: x}",
    "input: {path: [], prompt: x}",
    "input: {path: 5, prompt: x}",
    "input: {path: a, messages: []}",
    "input: {path: a, messages: [{role: user}]}",
    "input: {path: a, prompt: x, columns: [q, q]}",
    "input: {path: a, prompt: x, on_too_long: truncate}",
    "output: {}",
    "output: {path: o, rows_per_part: 0}",
    "output: {path: o, journal_interval: 3601}",
    "sampling: {max_token: 3}",
    "sampling: {temperature: hot}",
    "sampling: {top_p: 0}",
    "sampling: {stop: ['']}",
    "sampling: {stop: 5}",
    "sampling: {stop_token_ids: [-1]}",
    "sampling: {ignore_eos: no}",
    "sampling: {logprobs: 21}",
    "sampling: {early_stopping: 1}",
    "sampling: {early_stopping: null}",
    "sampling: {logit_bias: {the: 1}}",
    "sampling: {logit_bias: {5: ban}}",
    "sampling: {logit_bias: [[5, 1]]}",
    "sampling: {columns: {n: x}}",
    "engine: 5",
    "engine: {kv_dtype: int5}",
    "engine: {max_model_len: 1}",
    "engine: {block_size: null}",
    "eval: {metrics: [contains]}",
    "eval: {reference: a, metrics: []}",
    "eval: {reference: a, metrics: [contains, contains]}",
    "storage: {s3: {key: hush, secret: hush}}",
    "storage: {s3: {regin: x}}",
    "storage: {endpoint_url: x}",
]


@pytest.mark.parametrize("text", WRONG)
def test_what_is_no_job_is_not_valid(validator, text):
    job = with_text(text)

    assert not is_a_job(job)
    assert not validator.is_valid(job)


@pytest.mark.parametrize("key", ["model", "input", "output"])
def test_a_required_key_is_required(validator, key):
    assert not validator.is_valid({name: value for name, value in JOB.items() if name != key})
    assert validator.is_valid(JOB)
