import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from job_output import make_units

from jaxpaged.job import columns
from jaxpaged.job.input import input_plan, reader
from jaxpaged.job.output import output_table
from jaxpaged.job.row_window import FinishedBatch, RowResult, SampleResult
from jaxpaged.storage.files import SourceFiles


@pytest.fixture
def build(make_spec):
    """The table of the test's input, with a result for each row."""

    def make(results: list[RowResult], **sections):
        spec = make_spec(**sections)
        inputs = input_plan.plan(spec.input.path, files=SourceFiles())
        plan = columns.plan(spec, inputs)
        units = make_units(num_rows=inputs.num_rows, rows_per_part=100)
        left = iter(results)
        finished = [
            FinishedBatch(batch=batch, results=[next(left) for _ in range(len(batch))])
            for batch in reader.read(inputs, plan.needed, units)
        ]
        return output_table.build(finished, plan, spec.eval)

    return make


def sample(text: str, **values) -> SampleResult:
    return SampleResult(**({"text": text, "finish_reason": "stop"} | values))


def done(text: str, *, prompt_tokens: int = 4, seed: int = 0, **values) -> RowResult:
    return RowResult(samples=(sample(text, **values),), prompt_tokens=prompt_tokens, seed=seed)


def test_rows_have_their_cells_results_and_addresses(write_rows, build):
    write_rows("a.parquet", q=["a", "b", "c"], n=[1, None, 3], row_group_size=2)

    table = build(
        [
            done("x", prompt_tokens=3, completion_tokens=2, seed=7, token_ids=(1, 2)),
            RowResult(error_code="null_prompt", error_message="why"),
            done("z", stop_reason="</s>", ends_in_partial_character=True),
        ],
        input={"prompt_column": "q"},
        output={"token_ids": True},
    )

    assert table.select(["q", "n", "completion", "finish_reason", "error_code"]).to_pylist() == [
        {"q": "a", "n": 1, "completion": "x", "finish_reason": "stop", "error_code": None},
        {
            "q": "b",
            "n": None,
            "completion": None,
            "finish_reason": "error",
            "error_code": "null_prompt",
        },
        {"q": "c", "n": 3, "completion": "z", "finish_reason": "stop", "error_code": None},
    ]
    assert table["row"].to_pylist() == [
        {"file": "a.parquet", "row_group": 0, "index": 0},
        {"file": "a.parquet", "row_group": 0, "index": 1},
        {"file": "a.parquet", "row_group": 1, "index": 0},
    ]
    assert table["token_ids"].to_pylist() == [[1, 2], [], []]
    assert table["prompt_tokens"].to_pylist() == [3, None, 4]
    assert table["ends_in_partial_character"].to_pylist() == [False, False, True]


@pytest.mark.parametrize(
    "kind",
    [
        pa.large_string(),
        pa.string_view(),
        pa.dictionary(pa.int32(), pa.string()),
        pa.dictionary(pa.int8(), pa.string(), ordered=True),
    ],
    ids=str,
)
def test_carried_columns_keep_their_types(write_rows, build, tmp_path, kind):
    plain = pa.array(["a", None, "b"])
    encoded = (
        plain.dictionary_encode().cast(kind) if pa.types.is_dictionary(kind) else plain.cast(kind)
    )
    write_rows(q=encoded, chat=[[{"role": "user"}], None, []], d=pa.array([1, 2, 3], pa.date32()))

    table = build([done("x")] * 3, input={"prompt": "x"})
    pq.write_table(table, tmp_path / "out.parquet")
    again = pq.read_table(tmp_path / "out.parquet")

    assert again.schema.field("q").type == kind
    assert again.schema.field("d").type == pa.date32()
    assert again["q"].to_pylist() == ["a", None, "b"]
    assert again["chat"].to_pylist() == [[{"role": "user"}], None, []]


@pytest.mark.parametrize(
    "kind",
    [
        pa.string_view(),
        pa.dictionary(pa.int8(), pa.string()),
        pa.list_(pa.string_view()),
        pa.list_(pa.string()),
    ],
    ids=str,
)
def test_exploded_rows_repeat_their_cells_whatever_the_type(write_rows, build, monkeypatch, kind):
    values = [["a", "b"], None, []] if pa.types.is_list(kind) else ["a", None, "b"]
    encoded = pa.array(values).dictionary_encode() if pa.types.is_dictionary(kind) else values
    write_rows(q=pa.array(encoded, kind) if encoded is values else encoded.cast(kind))
    monkeypatch.setattr(output_table, "_MAX_REPEATED_BYTES", 1)
    row = RowResult(samples=(sample("x"), sample("y", finish_reason="length")))

    table = build(
        [row, RowResult(error_code="null_prompt"), row],
        input={"prompt": "x"},
        output={"explode": True},
        sampling={"n": 2, "temperature": 1.0},
    )

    assert table.schema.field("q").type == kind
    assert table["q"].to_pylist() == [value for value in values for _ in range(2)]
    assert table["completion"].to_pylist() == ["x", "y", None, None, "x", "y"]
    assert table["finish_reason"].to_pylist() == [
        "stop", "length", "error", "error", "stop", "length",
    ]  # fmt: skip
    assert table["sample"].to_pylist() == [0, 1] * 3


def test_scores_count_failed_rows_as_wrong_and_skip_null_references(write_rows, build):
    write_rows(q=["a"] * 4, answer=["5", "5", None, "5"])

    table = build(
        [
            done("it is 5"),
            done("6"),
            done("5"),
            RowResult(error_code="timeout"),
        ],
        input={"prompt_column": "q"},
        eval={"reference": "answer", "metrics": ["contains", "exact_match"]},
    )

    assert table["score_contains"].to_pylist() == [True, False, None, False]
    assert table["score_exact_match"].to_pylist() == [False, False, None, False]


def test_half_a_surrogate_pair_is_replaced(write_rows, build):
    write_rows(q=["a", "b"])

    table = build([done("x\ud800y"), done("é")], input={"prompt_column": "q"})

    assert table["completion"].to_pylist() == ["x?y", "é"]
