"""The sample jobs and their data: the Parquet files are their sources, the questions are fair."""

import importlib.util
import pathlib
import re
import types

import click
import pyarrow as pa
import pytest
from pyarrow import parquet

from jaxpaged.job.spec import JobSpec

ROOT = pathlib.Path(__file__).resolve().parent.parent
DATA = ROOT / "jobs" / "data"

# In these the answer is chosen from, or found in, the question itself.
ANSWER_IS_IN_QUESTION = {"yes_no", "reading", "sentiment"}


@pytest.fixture(scope="module")
def converter() -> types.ModuleType:
    path = ROOT / "scripts" / "make_job_data.py"
    spec = importlib.util.spec_from_file_location("make_job_data", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def questions() -> list[dict]:
    return parquet.read_table(DATA / "questions.parquet").to_pylist()


def test_every_source_has_its_parquet_file():
    sources = {path.stem for path in DATA.glob("*.tsv")}
    assert sources == {path.stem for path in DATA.glob("*.parquet")} == {"questions", "topics"}


@pytest.mark.parametrize("name", ["questions", "topics"])
def test_parquet_is_the_conversion_of_its_source(converter: types.ModuleType, name: str):
    expected = converter.read_table(DATA / f"{name}.tsv")
    found = parquet.read_table(DATA / f"{name}.parquet")
    assert found.schema.remove_metadata() == expected.schema
    assert found.to_pylist() == expected.to_pylist()


@pytest.mark.parametrize(
    "line", ["1\tParis", "1\tfacts\t", "one\tfacts\tParis", "1\tfacts\tParis\tLondon", ""]
)
def test_a_malformed_source_line_is_named(
    converter: types.ModuleType, tmp_path: pathlib.Path, line: str
):
    source = tmp_path / "rows.tsv"
    source.write_text(f"id\tcategory\tanswer\n0\tfacts\tRome\n{line}\n3\tfacts\tOslo\n")
    with pytest.raises(click.ClickException, match=r"rows\.tsv, line 3: expected 3 filled cells"):
        converter.read_table(source)


def test_questions_have_the_documented_columns():
    schema = parquet.read_schema(DATA / "questions.parquet")
    assert schema.field("id").type == pa.int32()
    assert schema.names == ["id", "category", "question", "answer"]


def test_questions_are_many_and_distinct(questions: list[dict]):
    assert len(questions) >= 150
    assert len({row["id"] for row in questions}) == len(questions)
    assert len({row["question"] for row in questions}) == len(questions)


def test_no_cell_is_empty_or_padded(questions: list[dict]):
    texts = [row[name] for row in questions for name in ("category", "question", "answer")]
    assert all(text and text == text.strip() for text in texts)


def test_answers_are_short(questions: list[dict]):
    assert max(len(row["answer"].split()) for row in questions) <= 3


def test_repeating_the_question_earns_nothing(questions: list[dict]):
    for row in questions:
        if row["category"] not in ANSWER_IS_IN_QUESTION:
            answer = rf"(?<!\w){re.escape(row['answer'])}(?!\w)"
            assert not re.search(answer, row["question"], re.IGNORECASE), row


def test_yes_and_no_are_balanced(questions: list[dict]):
    answers = [row["answer"] for row in questions if row["category"] == "yes_no"]
    assert answers.count("yes") == answers.count("no") == len(answers) / 2


@pytest.mark.parametrize("name", ["eval", "generate"])
def test_job_file_names_data_and_columns_that_exist(name: str):
    spec = JobSpec.from_file(ROOT / "jobs" / f"{name}.yaml")
    (path,) = spec.input.path
    columns = set(parquet.read_schema(path).names)
    assert spec.input.messages is not None
    used = {
        column
        for message in spec.input.messages
        for column in re.findall(r"{{ (\w+) }}", message.content)
    }
    assert used
    assert used <= columns
    assert spec.output.path == str(ROOT / "out" / name)


def test_eval_job_scores_by_columns_of_its_data(questions: list[dict]):
    spec = JobSpec.from_file(ROOT / "jobs" / "eval.yaml")
    assert spec.eval is not None
    assert {spec.eval.reference, spec.eval.by} <= questions[0].keys()
    assert "contains" in spec.eval.metrics
