import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxpaged.errors import ConfigError, InputSchemaError
from jaxpaged.job import columns, result_columns
from jaxpaged.job.input import input_plan
from jaxpaged.storage.files import SourceFiles


@pytest.fixture
def plan(make_spec):
    def make(**sections):
        spec = make_spec(**sections)
        return columns.plan(spec, input_plan.plan(spec.input.path, files=SourceFiles()))

    return make


def test_the_output_has_the_carried_columns_then_the_job_s(write_rows, plan):
    write_rows(id=[1], q=["a"], other=pa.array([1.5], pa.float32()))

    found = plan(input={"prompt": "{{ q }}"}, output={"token_ids": True, "prompt": True},
                 eval={"reference": "q", "metrics": ["contains"]})  # fmt: skip

    assert found.needed == ("id", "q", "other")
    assert found.output.names == [
        "id", "q", "other",
        "completion", "finish_reason", "stop_reason",
        "prompt_tokens", "completion_tokens", "cached_tokens",
        "error_code", "error_message", "row", "seed", "prompt_sha256",
        "ends_in_partial_character", "score_contains", "token_ids", "prompt",
    ]  # fmt: skip
    assert found.output.field("id").type == pa.int64()
    assert found.output.field("other").type == pa.float32()
    assert found.output.field("completion").type == pa.large_string()
    assert found.output.field("prompt_tokens").type == pa.int32()
    assert found.output.field("token_ids").type == pa.list_(pa.int32())


def test_only_needed_columns_are_read(write_rows, plan):
    write_rows(id=[1], unused=["x"], q=["a"], t=[0.5], answer=["b"])

    found = plan(
        input={"prompt": "{{ q }}", "columns": ["id"]},
        sampling={"columns": {"temperature": "t"}},
        eval={"reference": "answer", "metrics": ["contains"]},
    )

    assert found.needed == ("id", "q", "t", "answer")
    assert found.carried.names == ["id"]
    assert plan(input={"prompt_column": "q", "columns": []}).carried.names == []


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"input": {"prompt": "{{ qestion }}"}},
            r"input.prompt: the input has no column 'qestion'; did you mean 'question'\? its "
            r"columns: question, n, chat, ids, raw",
        ),
        (
            {"input": {"messages": [{"role": "user", "content": "{{ x }}"}]}},
            r"input.messages\[0\].content: the input has no column 'x'",
        ),
        ({"input": {"prompt_column": "n"}}, r"column 'n' must be text, but it is int64"),
        ({"input": {"prompt_ids_column": "question"}}, r"must be a list of integers, but it is"),
        ({"input": {"messages_column": "n"}}, r"must be a list of role and content, or JSON"),
        ({"input": {"messages_column": "ids"}}, r"must be a list of role and content, or JSON"),
        ({"input": {"prompt": "{{ raw }}"}}, r"'raw' must be something to write as text, but"),
        (
            {"input": {"prompt_column": "question", "columns": ["questoin"]}},
            r"input.columns\[0\]: the input has no column 'questoin'; did you mean 'question'\?",
        ),
        (
            {"input": {"prompt_column": "question"}, "sampling": {"columns": {"seed": "question"}}},
            r"sampling.columns.seed: column 'question' must be an integer, but it is string",
        ),
        (
            {
                "input": {"prompt_column": "question"},
                "eval": {"reference": "ids", "metrics": ["contains"]},
            },
            r"eval.reference: column 'ids' must be text, a number or a truth value",
        ),
        (
            {
                "input": {"prompt_column": "question", "columns": ["question"]},
                "eval": {"reference": "question", "metrics": ["contains"], "by": "n"},
            },
            r"eval.by: column 'n' is not carried; add it to input.columns",
        ),
    ],
)
def test_a_column_that_does_not_fit_is_named_with_its_key(write_rows, plan, sections, message):
    write_rows(
        question=["a"],
        n=[1],
        chat=[[{"role": "user", "content": "a"}]],
        ids=[[1, 2]],
        raw=[b"a"],
    )

    with pytest.raises(InputSchemaError, match=message):
        plan(**sections)


@pytest.mark.parametrize(
    "kind",
    [
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.dictionary(pa.int32(), pa.string()),
        pa.dictionary(pa.int8(), pa.large_string()),
    ],
)
def test_every_kind_of_text_is_a_prompt(write_rows, plan, kind):
    write_rows(q=pa.array(["a"]).cast(pa.large_string()).cast(kind)
               if not pa.types.is_dictionary(kind) else pa.array(["a"]).cast(kind))  # fmt: skip

    assert plan(input={"prompt_column": "q"}).needed == ("q",)


def test_an_input_column_named_like_a_result_is_refused_unless_left_out(write_rows, plan):
    write_rows(q=["a"], completion=["x"], seed=[1], prompt=["kept: the job does not write it"])

    with pytest.raises(InputSchemaError, match=r"column 'completion', 'seed' is named like"):
        plan(input={"prompt_column": "q"})

    found = plan(input={"prompt_column": "q", "columns": ["q", "prompt"]})
    assert found.carried.names == ["q", "prompt"]


def test_files_must_agree_on_the_needed_columns(write_rows, plan):
    write_rows("a.parquet", q=["a"], n=[1])
    write_rows("b.parquet", n=["text"], q=["b"], more=[1])

    with pytest.raises(InputSchemaError, match=r"b.parquet: column 'n' is string, but int64 in a"):
        plan(input={"prompt_column": "q"})
    assert plan(input={"prompt_column": "q", "columns": ["q"]}).needed == ("q",)

    write_rows("b.parquet", n=[2], q=["b"], more=[1])
    with pytest.raises(InputSchemaError, match=r"b.parquet: column 'more' is not in a.parquet"):
        plan(input={"prompt_column": "q"})

    write_rows("b.parquet", n=[2])
    with pytest.raises(InputSchemaError, match=r"b.parquet: column 'q' is missing, but string in"):
        plan(input={"prompt_column": "q"})


def test_malformed_templates_are_refused_with_their_line(write_rows, plan):
    write_rows(q=["a"])

    with pytest.raises(ConfigError, match=r"input.prompt: line 2 of the template"):
        plan(input={"prompt": "a\n{{ q "})
    with pytest.raises(ConfigError, match=r"include, import and extends are not available"):
        plan(input={"prompt": "{% include 'x' %}"})


def test_builtin_names_are_no_columns_unless_there_is_one(write_rows, plan):
    write_rows(q=["a"])
    template = "{% for i in range(2) %}{{ q }}{% endfor %}"

    assert plan(input={"prompt": template, "columns": []}).needed == ("q",)
    write_rows(q=["a"], range=["b"])
    assert plan(input={"prompt": "{{ range }}", "columns": []}).needed == ("range",)


def test_extension_types_are_carried_as_their_storage(tmp_path, plan):
    (tmp_path / "in").mkdir()
    uuids = pa.array([b"0123456789abcdef"], pa.binary(16)).cast(pa.uuid())
    pq.write_table(pa.table({"q": ["a"], "u": uuids}), tmp_path / "in" / "x.parquet")

    assert plan(input={"prompt_column": "q"}).output.field("u").type == pa.binary(16)


SAMPLE = ["text", "finish_reason", "stop_reason", "completion_tokens", "cumulative_logprob",
          "ends_in_partial_character"]  # fmt: skip


def written(found) -> list[str]:
    """The columns that every job writes, and some do, without the carried ones."""
    return found.output.names[len(found.carried) :]


FLAT = [field.name for field in result_columns.RESULT_FIELDS]


@pytest.mark.parametrize(
    ("sampling", "more"),
    [
        ({}, []),
        ({"logprobs": 0}, ["cumulative_logprob", "logprobs"]),
        ({"best_of": 3, "temperature": 1.0}, ["cumulative_logprob"]),
        ({"beam_width": 3}, ["cumulative_logprob", "score"]),
        ({"prompt_logprobs": 1}, ["prompt_logprobs"]),
    ],
)
def test_what_is_asked_of_the_engine_is_written(write_rows, plan, sampling, more):
    write_rows(q=["a"])
    job = {"input": {"prompt_column": "q"}}

    assert written(plan(**job, sampling=sampling)) == [*FLAT, *more]
    assert written(plan(**job, sampling=sampling, output={"explode": True})) == [
        *FLAT, "sample", *more,
    ]  # fmt: skip


def test_several_completions_are_a_list_of_all_that_is_said_of_one(write_rows, plan):
    write_rows(q=["a"])
    job = {"input": {"prompt_column": "q"}, "sampling": {"n": 2, "temperature": 1.0}}

    found = plan(**job)
    rich = plan(
        input=job["input"] | {"on_too_long": "truncate_left"},
        output={"token_ids": True, "prompt": True},
        sampling={"n": 2, "beam_width": 2, "logprobs": 1, "prompt_logprobs": 1},
    )

    assert written(found) == ["completions", *FLAT[1:]]
    kind = found.output.field("completions").type
    assert [field.name for field in kind.value_type] == SAMPLE
    assert (found.form, found.rows_each) == ("list", 1)
    assert written(rich) == [
        "completions", *FLAT[1:], "prompt", "prompt_logprobs", "truncated_tokens",
    ]  # fmt: skip
    names = [field.name for field in rich.output.field("completions").type.value_type]
    assert names == [*SAMPLE, "score", "logprobs", "token_ids"]
    assert (plan(**job, output={"explode": True}).form, rich.form) == ("exploded", "list")
    assert plan(**job, output={"explode": True}).rows_each == 2
