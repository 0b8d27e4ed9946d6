"""Small inputs, real tokenizers of tiny models, and job specs over them."""

import pathlib
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scripted_engine import ScriptedEngine
from tiny import write_tiny_llama

from jaxpaged.job.spec import JobSpec
from jaxpaged.model.checkpoint import open_checkpoint
from jaxpaged.model.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def make_tokenizer(tmp_path_factory) -> Callable[..., Tokenizer]:
    """The tokenizer of a tiny model; a byte is a token."""

    def make(**model: object) -> Tokenizer:
        folder = write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", **model)
        return open_checkpoint(folder).tokenizer()

    return make


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> pathlib.Path:
    """A tiny model's folder; nobody changes it."""
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tokenizer(make_tokenizer) -> Tokenizer:
    """With a beginning-of-sequence token and a chat template."""
    return make_tokenizer()


@pytest.fixture
def write_rows(tmp_path) -> Callable[..., pathlib.Path]:
    """Writes a Parquet file of columns into the test's `in` folder."""

    def write(name: str = "rows.parquet", row_group_size: int | None = None, **columns):
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(columns), path, row_group_size=row_group_size)
        return path

    return write


@pytest.fixture
def make_spec(tmp_path, model) -> Callable[..., JobSpec]:
    """A job from the test's `in` folder to its `out` folder; sections are merged by key."""

    def make(**sections) -> JobSpec:
        job: dict[str, Any] = {
            "model": str(model),
            "input": {"path": str(tmp_path / "in")},
            "output": {"path": str(tmp_path / "out")},
        }
        for name, section in sections.items():
            job[name] = job.get(name, {}) | section if isinstance(section, dict) else section
        return JobSpec.from_dict(job)

    return make


@pytest.fixture
def out(tmp_path) -> pathlib.Path:
    return tmp_path / "out"


@pytest.fixture
def engine(tokenizer):
    def make(**options) -> ScriptedEngine:
        return ScriptedEngine(tokenizer, **options)

    return make
