"""Jobs whose rows are too long, null, or have parameters of their own: every row comes out."""

import hashlib
import struct

import pyarrow as pa
import pytest
from job_output import rows
from tiny import BOS_ID, byte_id

from jaxpaged.errors import ConfigError, InputSchemaError
from jaxpaged.job.runner import run_job

# With the token at its beginning 4, 40 and 4 tokens.
SHORT, LONG = "abc", "abcdefghijklmnopqrstuvwxyz0123456789ABC"


def sha256(text: str) -> str:
    ids = [BOS_ID, *map(byte_id, text.encode())]
    return hashlib.sha256(struct.pack(f"<{len(ids)}i", *ids)).hexdigest()


@pytest.fixture
def run(make_spec, engine, out):
    """The rows of a job whose sequences have 32 tokens at most."""

    def complete(source: dict, **sampling: object) -> list[dict]:
        spec = make_spec(
            input=source, engine={"max_model_len": 32}, sampling={"max_tokens": 4} | sampling
        )
        run_job(spec, engine=engine(max_model_len=32))
        return rows(out)

    return complete


def test_a_prompt_that_is_too_long_harms_no_other(write_rows, run):
    write_rows(q=[SHORT, LONG, SHORT])

    found = run({"prompt_column": "q"})

    assert [row["error_code"] for row in found] == [None, "prompt_too_long", None]
    assert [row["prompt_tokens"] for row in found] == [4, 40, 4]
    assert found[0]["completion"] == found[2]["completion"] is not None


@pytest.mark.parametrize("order", [(0, 1, 0), (1, 0, 0), (0, 0, 1)])
def test_prompts_are_cut_wherever_they_are(write_rows, run, order):
    texts = [(SHORT, LONG)[i] for i in order]
    write_rows(q=texts)

    found = run({"prompt_column": "q", "on_too_long": "truncate_left"})

    assert [row["error_code"] for row in found] == [None] * 3
    assert [row["prompt_tokens"] for row in found] == [(4, 28)[i] for i in order]
    assert [row["truncated_tokens"] for row in found] == [(0, 12)[i] for i in order]
    assert [row["prompt_sha256"] for row in found] == [sha256(text) for text in texts]


def test_rows_that_are_passed_over_are_there_and_no_errors(write_rows, run):
    write_rows(q=[SHORT, LONG, None])

    found = run({"prompt_column": "q", "on_too_long": "skip", "on_null": "skip"})

    assert [row["finish_reason"] for row in found] == ["length", "skipped", "skipped"]
    assert [row["stop_reason"] for row in found][1:] == ["prompt_too_long", "null_prompt"]
    assert [row["error_code"] for row in found] == [None] * 3
    assert [row["completion"] for row in found][1:] == [None, None]


@pytest.mark.parametrize(
    ("name", "column", "expected"),
    [
        ("top_p", pa.array(["x"]), "a number"),
        ("min_tokens", pa.array([0.5]), "an integer"),
        ("ignore_eos", pa.array([1]), "a truth value"),
        ("stop", pa.array([1]), "text or a list of texts"),
        ("stop_token_ids", pa.array([1]), "a list of integers"),
        ("logit_bias", pa.array([[1.0]]), "a map from token ids to numbers, or JSON text of one"),
    ],
)
def test_a_column_of_the_wrong_type_is_refused_at_once(write_rows, run, name, column, expected):
    write_rows(q=["a"], c=column)

    message = f"sampling.columns.{name}: column 'c' must be {expected}, but it is "
    with pytest.raises(InputSchemaError, match=message):
        run({"prompt_column": "q"}, columns={name: "c"})


def test_rows_have_their_own_stops_and_biases_and_a_bad_one_harms_no_other(write_rows, run):
    alone = {"prompt_column": "q", "columns": ["q"]}
    write_rows(
        q=["abcd"] * 5,
        s=pa.array([None, ["b"], [], ["zz", "c"], [""]], pa.list_(pa.string())),
        b=pa.array([None, [(5, 1.0)], [], [(5, -1.0)], None], pa.map_(pa.int32(), pa.float32())),
    )

    found = run(alone, columns={"stop": "s", "logit_bias": "b"})

    assert [row["error_code"] for row in found] == [None] * 4 + ["bad_row_params"]
    assert found[4]["error_message"] == "column 's': stop must be non-empty strings, got ('',)"


def test_an_empty_stop_string_of_the_job_is_refused(make_spec):
    with pytest.raises(ConfigError, match=r"sampling\.stop: must be non-empty strings"):
        make_spec(input={"prompt_column": "q"}, sampling={"stop": [""]})
