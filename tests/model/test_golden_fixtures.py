"""The golden files are the ones their README speaks of, and their texts are read as by others."""

import hashlib
import pathlib

import pyarrow.parquet as pq
import pytest

from jaxpaged.model.checkpoint import open_checkpoint


@pytest.fixture(scope="module")
def rows(golden) -> list[dict]:
    return pq.read_table(golden / "greedy.parquet").to_pylist()


def test_readme_names_every_file_with_its_hash(golden: pathlib.Path):
    readme = (golden / "README.md").read_text()
    files = [file for file in golden.iterdir() if file.name != "README.md"]
    assert len(files) == 11
    for file in files:
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        assert f"`{file.name}`" in readme
        assert digest in readme, f"{file.name}: {digest}"
        assert file.stat().st_size < 1_000_000


def test_prompts_are_varied_and_their_tokens_decided(rows):
    lengths = sorted(len(row["prompt_ids"]) for row in rows)
    assert len(rows) >= 16
    assert lengths[0] == 1
    assert lengths[-1] > 280
    assert all(len(row["tokens"]) == 32 for row in rows)
    assert all(row["top_ids"][0] == row["tokens"][0] for row in rows)
    assert min(row["min_gap"] for row in rows) >= 2e-3


def test_prompts_and_completions_are_read_as_by_transformers(rows, packaged_model):
    tokenizer = open_checkpoint(packaged_model).tokenizer()
    for row in rows:
        assert tokenizer.encode(row["prompt"]) == row["prompt_ids"], row["name"]
        text = tokenizer.decode(row["tokens"], skip_special_tokens=False)
        assert text == row["text"], row["name"]
