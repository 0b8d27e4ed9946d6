import pyarrow as pa
import pytest

from jaxpaged.job.input.row_batch import RowBatch
from jaxpaged.job.prompt.param_columns import param_type
from jaxpaged.job.prompt.row_fault import RowFault
from jaxpaged.job.prompt.row_params import RowParams
from jaxpaged.job.sampling_section import SamplingColumns
from jaxpaged.job.units import Unit
from jaxpaged.request import SamplingParams

JOB = SamplingParams(
    max_tokens=9, temperature=0.5, stop=("x",), bad_words=("no",), logit_bias=((3, 1.0),)
)

TEXTS = pa.list_(pa.string())
BIAS = pa.map_(pa.int32(), pa.float32())
INF = float("inf")

# For each parameter: the type of a column, a cell, and the parameter's value.
GOOD = [
    ("max_tokens", pa.int8(), 3, 3),
    ("min_tokens", pa.uint64(), 3, 3),
    ("temperature", pa.float32(), 0.1, 0.1),
    ("temperature", pa.int64(), 2, 2.0),
    ("top_k", pa.int32(), -1, -1),
    ("top_p", pa.float64(), 0.25, 0.25),
    ("min_p", pa.float16(), 0.25, 0.25),
    ("typical_p", pa.float64(), 1.0, 1.0),
    ("repetition_penalty", pa.float64(), 1.5, 1.5),
    ("presence_penalty", pa.float64(), -1.5, -1.5),
    ("frequency_penalty", pa.int8(), -2, -2.0),
    ("seed", pa.int64(), 2**63 - 1, 2**63 - 1),
    ("ignore_eos", pa.bool_(), True, True),
    ("stop", pa.string(), "END", ("END",)),
    ("stop", TEXTS, ["a", "b"], ("a", "b")),
    ("stop", TEXTS, [], ()),
    ("stop_token_ids", pa.list_(pa.int16()), [4, 5], (4, 5)),
    ("stop_token_ids", pa.large_list(pa.int64()), [], ()),
    ("bad_words", TEXTS, ["a b"], ("a b",)),
    ("bad_words", pa.large_string(), "a b", ("a b",)),
    ("logit_bias", BIAS, [(5, 1.5), (2, -2.0)], ((2, -2.0), (5, 1.5))),
    ("logit_bias", BIAS, [(5, -INF)], ((5, -INF),)),
    ("logit_bias", BIAS, [], ()),
    ("logit_bias", pa.string(), '{"5": 1, "2": "-inf"}', ((2, -INF), (5, 1.0))),
    ("logit_bias", pa.string(), "{}", ()),
]

BAD = [
    ("max_tokens", pa.int64(), 0, "max_tokens must be at least 1, got 0"),
    ("min_tokens", pa.int64(), -1, "min_tokens must be at least 0, got -1"),
    ("min_tokens", pa.int64(), 10, "min_tokens .column 'c'. 10 is above max_tokens 9"),
    ("temperature", pa.float64(), -1.0, "temperature must be from 0 to 10,000, got -1.0"),
    ("temperature", pa.float64(), float("nan"), "temperature must be from 0 to 10,000, got nan"),
    ("top_k", pa.int64(), 2**31, "top_k must be at least 1 and below"),
    ("top_p", pa.float64(), 0.0, "top_p must be above 0 and at most 1, got 0.0"),
    ("min_p", pa.float64(), 1.5, "min_p must be from 0 to 1, got 1.5"),
    ("typical_p", pa.float64(), 2.0, "typical_p must be above 0 and at most 1, got 2.0"),
    (
        "repetition_penalty",
        pa.float64(),
        0.0,
        "repetition_penalty must be above 0 and at most 10,0",
    ),
    ("presence_penalty", pa.float64(), INF, "presence_penalty must be from -10,000 to"),
    ("frequency_penalty", pa.float64(), -1e5, "frequency_penalty must be from -10,000 to"),
    ("seed", pa.int64(), -1, "seed must be from 0 to"),
    ("stop", pa.string(), "", "stop must be non-empty strings"),
    ("stop", TEXTS, ["a", None], "stop: expected text or a list of texts, found a null in it"),
    ("stop_token_ids", pa.list_(pa.int64()), [-1], "stop_token_ids must be token ids"),
    ("stop_token_ids", pa.list_(pa.int64()), [None], "expected an integer, found a null"),
    ("bad_words", TEXTS, [""], "bad_words must be non-empty strings"),
    ("logit_bias", BIAS, [(-5, 1.0)], "logit_bias: expected a token id, found -5"),
    ("logit_bias", BIAS, [(5, None)], "logit_bias: token id 5: expected a number .* found None"),
    ("logit_bias", BIAS, [(5, 1.0), (5, 2.0)], "logit_bias: token id 5 is there twice"),
    ("logit_bias", BIAS, [(5, INF)], "logit_bias: token id 5: expected a number"),
    ("logit_bias", pa.string(), "5: 1", "logit_bias: expected JSON text such as"),
    ("logit_bias", pa.string(), "[" * 100_000, "logit_bias: expected JSON text such as"),
    ("logit_bias", pa.string(), "[[5, 1]]", "expected JSON text .* found a list in it"),
    ("logit_bias", pa.string(), '{"5": 1, "5": 2}', "logit_bias: token id 5 is there twice"),
    ("logit_bias", pa.string(), '{"the": 1}', "logit_bias: expected a token id, found 'the'"),
    ("logit_bias", pa.string(), '{"5": {"6": 1}}', "token id 5: expected a number"),
    ("logit_bias", pa.string(), '{"5": NaN}', "token id 5: expected a number"),
]

# Types that a column cannot have, and cells that no column of the right type has.
WRONG = [
    ("max_tokens", pa.float64(), 3.0),
    ("min_tokens", pa.string(), "3"),
    ("temperature", pa.string(), "1"),
    ("temperature", pa.bool_(), True),
    ("top_k", pa.bool_(), True),
    ("top_p", TEXTS, ["1"]),
    ("min_p", pa.string(), "1"),
    ("typical_p", pa.string(), "1"),
    ("repetition_penalty", pa.string(), "1"),
    ("presence_penalty", pa.string(), "1"),
    ("frequency_penalty", pa.string(), "1"),
    ("seed", pa.float32(), 1.0),
    ("ignore_eos", pa.int8(), 1),
    ("stop", pa.int64(), 5),
    ("stop", pa.list_(pa.int64()), [5]),
    ("stop_token_ids", TEXTS, ["5"]),
    ("stop_token_ids", pa.int64(), 5),
    ("bad_words", pa.list_(TEXTS), [["a"]]),
    ("logit_bias", pa.list_(pa.float32()), [1.0]),
    ("logit_bias", pa.map_(pa.string(), pa.float32()), [("the", 1.0)]),
    ("logit_bias", pa.map_(pa.int32(), pa.string()), [(5, "1")]),
]


def read(kind: pa.DataType, cell: object) -> object:
    """A cell as rows of batches have it."""
    batch = RowBatch(
        unit=Unit(index=0, start=0, stop=1),
        start=0,
        file="f",
        row_group=0,
        first_index=0,
        cells=pa.record_batch({"c": pa.array([cell], kind)}),
        invalid={},
    )
    [row] = batch.rows(["c"])
    return row.cells["c"]


def test_every_parameter_of_a_row_is_tried():
    for cases in (GOOD, WRONG):
        assert {case[0] for case in cases} == set(SamplingColumns.model_fields)
    assert {case[0] for case in BAD} == set(SamplingColumns.model_fields) - {"ignore_eos"}


@pytest.mark.parametrize(("name", "kind", "cell", "value"), GOOD)
def test_a_row_s_cell_takes_the_place_of_the_job_s_value(name, kind, cell, value):
    assert param_type(name).fits(kind)

    found = RowParams(JOB, {name: "c"}).of({"c": read(kind, cell)})

    changed = {field: getattr(JOB, field) for field in SamplingColumns.model_fields} | {name: value}
    assert {field: getattr(found, field) for field in changed} == changed
    assert type(getattr(found, name)) is type(value)


@pytest.mark.parametrize("name", SamplingColumns.model_fields)
def test_a_null_cell_leaves_the_job_s_value(name):
    assert RowParams(JOB, {name: "c"}).of({"c": None}) == JOB


@pytest.mark.parametrize(("name", "kind", "cell", "reason"), BAD)
def test_a_bad_cell_spoils_its_row_and_names_the_column(name, kind, cell, reason):
    assert param_type(name).fits(kind)

    with pytest.raises(RowFault, match=f"^bad_row_params: .*{reason}") as caught:
        RowParams(JOB, {name: "c"}).of({"c": read(kind, cell)})

    assert "column 'c'" in caught.value.reason


@pytest.mark.parametrize(("name", "kind", "cell"), WRONG)
def test_a_column_of_another_type_does_not_fit_nor_do_its_cells(name, kind, cell):
    assert not param_type(name).fits(kind)

    with pytest.raises(RowFault, match=f"bad_row_params: column 'c': {name}: .*expected "):
        RowParams(JOB, {name: "c"}).of({"c": read(kind, cell)})


def test_dictionaries_of_text_fit():
    kind = pa.dictionary(pa.int32(), pa.string())

    assert all(param_type(name).fits(kind) for name in ("stop", "bad_words", "logit_bias"))


def test_the_right_column_is_named_among_several():
    params = RowParams(JOB, {"max_tokens": "m", "min_tokens": "k", "top_p": "p"})

    with pytest.raises(RowFault, match=r"column 'p': top_p must be .*, got 2\.0"):
        params.of({"m": 1, "k": None, "p": 2.0})
    with pytest.raises(
        RowFault, match=r"min_tokens \(column 'k'\) 4 is above max_tokens \(column 'm'\) 3"
    ):
        params.of({"m": 3, "k": 4, "p": None})


@pytest.mark.parametrize("samples", [{"n": 2}, {"best_of": 3}])
def test_samples_of_a_greedy_row_are_refused(samples):
    params = RowParams(SamplingParams(**samples), {"temperature": "t"})

    assert params.of({"t": 0.5}).temperature == 0.5
    for cell in (0.0, None):
        with pytest.raises(RowFault, match=r"temperature \(column 't'\) must be above 0, as [23]"):
            params.of({"t": cell})
