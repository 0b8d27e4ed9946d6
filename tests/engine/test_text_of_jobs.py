"""B33 and B34: what a model wrote is what the output says, down to bytes and spaces."""

import itertools
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny import byte_id, write_json, write_scripted_llama

from jaxpaged import JobSpec, run_job

LLAMA = "🦙".encode()


@pytest.fixture
def complete(tmp_path):
    """The output's first row for a model that says `text` behind the prompt "x"."""

    def run(text: bytes, settings: dict | None = None, kind: str = "bytes", **sampling) -> dict:
        ids = [byte_id(byte) for byte in b"x" + text]
        assert len(set(ids)) == len(ids), "a token has one successor"
        folder = write_scripted_llama(
            tmp_path / "model", dict(itertools.pairwise(ids)), tokenizer=kind
        )
        config = json.loads((folder / "tokenizer_config.json").read_text())
        write_json(folder / "tokenizer_config.json", config | (settings or {}))
        (tmp_path / "in").mkdir()
        pq.write_table(pa.table({"q": ["x"]}), tmp_path / "in" / "rows.parquet")
        spec = JobSpec.from_dict(
            {
                "model": str(folder),
                "input": {"path": str(tmp_path / "in"), "prompt_column": "q"},
                "output": {"path": str(tmp_path / "out"), "rows_per_part": 1},
                "sampling": sampling,
                "engine": {"max_model_len": 64, "max_num_seqs": 1},
            }
        )
        assert run_job(spec).output.rows == 1
        return pq.read_table(tmp_path / "out").to_pylist()[0]

    return run


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
@pytest.mark.parametrize("text", ["🦙", "깰", "é."])
def test_b33_characters_of_several_tokens_are_whole(complete, kind, text):
    row = complete(text.encode(), kind=kind)
    assert row["completion"] == text
    assert row["finish_reason"] == "stop"
    assert row["ends_in_partial_character"] is False


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_b33_a_cut_character_is_one_replacement_with_a_flag(complete, kind):
    row = complete(b"ab" + LLAMA, kind=kind, max_tokens=5)
    assert row["completion"] == "ab\ufffd"
    assert row["ends_in_partial_character"] is True
    assert (row["finish_reason"], row["completion_tokens"]) == ("length", 5)
    assert row["completion"].encode().decode() == row["completion"]


def test_b33_a_stop_string_behind_a_split_character_is_found(complete):
    row = complete(b"ab" + LLAMA + b"STO", stop="ST")
    assert row["completion"] == "ab🦙"
    assert row["stop_reason"] == "ST"


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
@pytest.mark.parametrize("text", [" the", "': 's", " .,!", " n't", "\n 1 , 2"])
def test_b34_spaces_stay_and_nothing_is_tidied_up(complete, kind, text):
    settings = {"clean_up_tokenization_spaces": True}
    distinct = "".join(dict.fromkeys(text))
    row = complete(distinct.encode(), settings, kind)
    assert row["completion"] == distinct
