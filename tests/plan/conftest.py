"""Jobs over tiny models for plans."""

import pathlib
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny import write_tiny_llama

from jaxpaged.job.spec import JobSpec


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> pathlib.Path:
    """A tiny model's folder; a byte is a token, with one in front of the text."""
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", hidden=64, heads=4)


@pytest.fixture
def make_spec(tmp_path, model) -> Callable[..., JobSpec]:
    """A job that completes the given prompts; sections are merged by key."""

    def make(prompts, **sections) -> JobSpec:
        folder = tmp_path / "in"
        folder.mkdir(exist_ok=True)
        pq.write_table(pa.table({"text": pa.array(prompts, pa.string())}), folder / "rows.parquet")
        job: dict[str, Any] = {
            "model": str(model),
            "input": {"path": "in", "prompt_column": "text"},
            "output": {"path": "out"},
            "sampling": {"max_tokens": 8, "ignore_eos": True},
            "engine": {
                "max_model_len": 64,
                "max_num_seqs": 4,
                "block_size": 4,
                "num_blocks": 40,
                # What "auto" does depends on times.
                "preemption": "recompute",
            },
        }
        for name, section in sections.items():
            job[name] = {**job[name], **section}
        return JobSpec.from_dict(job, tmp_path)

    return make
