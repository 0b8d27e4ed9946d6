"""Sequences longer than a model was made for: refused, stretched, counted, told."""

import logging

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny import write_tiny_llama

from jaxpaged import Engine, EngineConfig, JobSpec, SamplingParams, run_job
from jaxpaged.cache.capacity import PoolCapacity, longer_sequences
from jaxpaged.errors import ConfigError, IdentityError
from jaxpaged.job import validate
from jaxpaged.plan import job_plan
from jaxpaged.plan.job_plan import PlanOptions

ROPE = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
WARNING = (
    "engine.rope: sequences of 128 tokens in a model made for 64: one takes up to 8 blocks (0.0 "
    "MiB) instead of 4 (0.0 MiB)"
)


@pytest.fixture
def make_job(tmp_path):
    """A job over a model made for 64 tokens."""
    folder = write_tiny_llama(tmp_path / "model", max_position_embeddings=64)
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"q": ["a" * 90, "b"]}), tmp_path / "in" / "rows.parquet")

    def make(**engine) -> JobSpec:
        return JobSpec.from_dict(
            {
                "model": str(folder),
                "input": {"path": str(tmp_path / "in"), "prompt_column": "q"},
                "output": {"path": str(tmp_path / "out")},
                "sampling": {"max_tokens": 4},
                "engine": {"num_blocks": 24} | engine,
            }
        )

    return make


def test_without_a_rotation_of_its_own_a_longer_job_is_refused_with_the_remedy(make_job):
    for check in (
        lambda spec: validate.validate(spec, 1),
        lambda spec: job_plan.make(spec, PlanOptions()),
        run_job,
    ):
        with pytest.raises(ConfigError, match=r"or stretch its rotation.*engine\.rope: \{rope_ty"):
            check(make_job(max_model_len=128))


def test_the_cost_is_told_by_run_report_plan_and_validate(make_job, caplog):
    spec = make_job(max_model_len=128, rope=ROPE)

    found = validate.validate(spec, 2)
    plan = job_plan.make(spec, PlanOptions())
    with caplog.at_level(logging.WARNING):
        report = run_job(spec)

    assert any(text.startswith(WARNING) for text in found.warnings)
    assert f"{WARNING}; 3 of them fit the pool at once instead of 6" in "".join(plan.notes)
    assert caplog.text.count(f"{WARNING}; 3 of them fit the pool at once instead of 6") == 1
    assert report.run.engine["model_max_len"] == 64
    assert report.run.engine["max_model_len"] == 128
    assert [text for text in report.warnings if text.startswith("engine.rope")] == [
        "engine.rope: sequences of 128 tokens in a model made for 64; a sequence takes up to 8 "
        "blocks instead of 4, and 3 of them fit the pool at once instead of 6"
    ]
    assert report.output.finish_reasons.get("error", 0) == 0


def test_another_rotation_is_another_job(make_job):
    run_job(make_job(max_model_len=128, rope=ROPE))
    assert run_job(make_job(max_model_len=128, rope=ROPE)).state == "already finished"
    with pytest.raises(IdentityError, match=r"engine\.rope: .*'factor': 2\.0.* -> .*4\.0"):
        run_job(make_job(max_model_len=128, rope=ROPE | {"factor": 4.0}))


def test_a_rotation_without_longer_sequences_is_told_too(make_job, caplog):
    with caplog.at_level(logging.WARNING):
        report = run_job(make_job(max_model_len=64, rope=ROPE))
    assert "engine.rope changes what the model computes for every row" in caplog.text
    assert report.run.engine["model_max_len"] == 64


def test_the_decoder_is_that_of_a_config_with_the_same_rotation(tmp_path):
    own = write_tiny_llama(tmp_path / "own", max_position_embeddings=64)
    file = write_tiny_llama(tmp_path / "file", max_position_embeddings=64, rope=ROPE)
    prompt = list(np.random.default_rng(0).integers(3, 270, 100))
    params = SamplingParams(max_tokens=16, ignore_eos=True, logprobs=0)

    def complete(folder, **config):
        engine = Engine.load(folder, EngineConfig(max_model_len=128, max_num_seqs=2, **config))
        return engine.generate([list(map(int, prompt))], params)[0]

    found, expected = complete(own, rope=ROPE), complete(file)

    assert found.token_ids == expected.token_ids
    assert found.logprobs == expected.logprobs


def test_the_arithmetic_of_longer_sequences():
    pool = PoolCapacity(num_blocks=100, block_size=16, bytes_per_token=2**16)
    text = longer_sequences(100, 500, pool=pool)
    assert "up to 32 blocks (32.0 MiB) instead of 7 (7.0 MiB)" in text
    assert "3 of them fit the pool at once instead of 14" in text
    assert "fit the pool" not in longer_sequences(100, 500, pool=pool, is_sized=False)
