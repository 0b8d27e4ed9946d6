"""Jobs whose rows have several completions: as a list in one row, and as a row for each."""

import dataclasses
import io
import json
import pathlib
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import rich.console
from job_output import parts, rows
from outside_reader import by_duckdb, by_pandas, by_pyarrow
from scripted_engine import ScriptedEngine
from stop_after import StopAfter

from jaxpaged.errors import (
    ConfigError,
    InputSchemaError,
    OutputConflictError,
    TooManyRowErrors,
)
from jaxpaged.job import report_table
from jaxpaged.job.interrupt import JobInterrupted
from jaxpaged.job.look.diff import diff
from jaxpaged.job.look.status import status
from jaxpaged.job.look.verify import verify
from jaxpaged.job.output import part_file
from jaxpaged.job.planned_job import RunOptions
from jaxpaged.job.report import JobReport
from jaxpaged.job.retry import retry_job
from jaxpaged.job.runner import run_job
from jaxpaged.job.spec import JobSpec
from jaxpaged.job.units import Unit
from jaxpaged.storage.local_store import LocalStore

FORMS = pytest.mark.parametrize("explode", [False, True], ids=["list", "exploded"])

# The lengths that four samples of a row have.
LENGTHS = (1, 9, 3, 5)


def store(out: pathlib.Path) -> LocalStore:
    return LocalStore(out, private="_jaxpaged")


def forced(text: str, sample: int) -> str:
    """The text of a sample of a forced length; it tells the row too."""
    return (text.strip("[]") + "abcdefgh")[: LENGTHS[sample]]


def late_first(request) -> int:
    """Later rows finish earlier."""
    return 7 - request.request_id % 7


@pytest.fixture
def make(make_spec, tmp_path) -> Callable[..., JobSpec]:
    """A job with four samples for each row."""

    def make(name: str = "out", *, explode: bool = False, **sections: dict[str, Any]) -> JobSpec:
        own = {"path": str(tmp_path / name), "rows_per_part": 4, "explode": explode}
        defaults: dict[str, dict[str, Any]] = {
            "input": {"prompt_column": "q"},
            "output": own,
            "sampling": {"n": 4, "temperature": 1.0},
            "engine": {"max_num_seqs": 4},
        }
        merged = {key: value | sections.pop(key, {}) for key, value in defaults.items()}
        return make_spec(**merged, **sections)

    return make


@pytest.fixture
def double(engine) -> Callable[..., ScriptedEngine]:
    return lambda **options: engine(**({"vary": forced} | options))


def test_each_sample_has_its_own_text_and_end(write_rows, make, double, out):
    """B28: four samples of forced lengths, none lost, none overwritten."""
    write_rows(q=[str(i) for i in range(6)])
    spec = make(sampling={"max_tokens": 5}, output={"token_ids": True})

    report = run_job(spec, engine=double(num_steps=late_first))

    for i, row in enumerate(rows(out)):
        text = f"{i}abcdefgh"
        assert [sample["text"] for sample in row["completions"]] == [
            text[:1], text[:5], text[:3], text[:5],
        ]  # fmt: skip
        assert [sample["finish_reason"] for sample in row["completions"]] == [
            "stop", "length", "stop", "stop",
        ]  # fmt: skip
        reasons = [sample["stop_reason"] for sample in row["completions"]]
        assert reasons == ["</s>", "max_tokens", "</s>", "</s>"]
        assert [sample["completion_tokens"] for sample in row["completions"]] == [1, 5, 3, 5]
        assert [len(sample["token_ids"]) for sample in row["completions"]] == [1, 5, 3, 5]
        assert (row["finish_reason"], row["stop_reason"]) == ("length", None)
        assert row["completion_tokens"] == 14
    assert report.output.finish_reasons == {"length": 6}
    assert (report.output.rows, report.output.completion_tokens) == (6, 84)


@FORMS
def test_rows_are_in_the_input_s_order(write_rows, make, double, out, explode):
    """B27: later rows finish first, with less room than there are rows."""
    write_rows(q=[str(i) for i in range(6)])
    spec = make(explode=explode, engine={"max_num_seqs": 2}, output={"rows_per_part": 3})

    run_job(spec, engine=double(num_steps=late_first, max_num_seqs=2))

    each = 4 if explode else 1
    found = rows(out)
    assert [row["q"] for row in found] == [str(i) for i in range(6) for _ in range(each)]
    assert [row["row"]["index"] for row in found] == [i for i in range(6) for _ in range(each)]
    if explode:
        assert [row["sample"] for row in found] == [0, 1, 2, 3] * 6


def test_an_exploded_row_is_the_flat_row_of_its_sample(write_rows, make, double, out):
    write_rows(id=[5, 6], q=["x", None])
    spec = make(explode=True, sampling={"max_tokens": 5}, output={"token_ids": True})

    run_job(spec, engine=double())

    first, failed = rows(out)[:4], rows(out)[4:]
    assert [row["completion"] for row in first] == ["x", "xabcd", "xab", "xabcd"]
    assert [row["finish_reason"] for row in first] == ["stop", "length", "stop", "stop"]
    assert [row["stop_reason"] for row in first] == ["</s>", "max_tokens", "</s>", "</s>"]
    assert [row["completion_tokens"] for row in first] == [1, 5, 3, 5]
    assert [len(row["token_ids"]) for row in first] == [1, 5, 3, 5]
    assert {row["id"] for row in first} == {5}
    assert len({row["prompt_sha256"] for row in first}) == 1
    assert [row["sample"] for row in failed] == [0, 1, 2, 3]
    assert {row["error_code"] for row in failed} == {"null_prompt"}
    assert {row["completion"] for row in failed} == {None}


def test_one_sample_can_be_exploded_too(write_rows, make, engine, out):
    write_rows(q=["x", "y"])

    run_job(make(explode=True, sampling={"n": 1}), engine=engine())

    assert [(row["completion"], row["sample"]) for row in rows(out)] == [("[x]", 0), ("[y]", 0)]
    assert not verify(store(out)).problems


def test_a_row_that_fails_has_no_list(write_rows, make, double, out):
    write_rows(q=["x", None, "y" * 50])

    report = run_job(make(), engine=double(max_model_len=40))

    good, null, long = rows(out)
    assert len(good["completions"]) == 4
    assert (null["completions"], null["error_code"]) == (None, "null_prompt")
    assert (long["completions"], long["error_code"]) == (None, "prompt_too_long")
    assert (null["finish_reason"], null["completion_tokens"]) == ("error", 0)
    assert report.output.finish_reasons == {"stop": 1, "error": 2}


def test_half_a_surrogate_pair_in_a_list_is_replaced(write_rows, make, engine, out):
    write_rows(q=["x"])

    run_job(make(), engine=engine(vary=lambda text, sample: "a\ud800" if sample == 1 else text))

    assert [one["text"] for one in rows(out)[0]["completions"]] == ["[x]", "a?", "[x]", "[x]"]


@FORMS
def test_max_errors_counts_rows_of_the_input(write_rows, make, double, explode):
    write_rows(q=["x", None, None, "y"])

    report = run_job(make(explode=explode, max_errors=2), engine=double())

    assert report.num_errors == 2
    with pytest.raises(TooManyRowErrors, match="2 row errors"):
        run_job(make("other", explode=explode, max_errors=1), engine=double())


def counted(report: JobReport) -> dict[str, Any]:
    """What a report says of the rows, not of where they are."""
    values = report.to_json()
    return {
        "output": values["output"] | {"path": ""},
        **{key: values[key] for key in ("errors", "scores", "input_rows", "warnings")},
    }


def test_both_forms_of_a_job_have_the_same_report(write_rows, make, double):
    texts = ["x", "y", None, "y" * 50, "z", "xa", None]
    write_rows(q=texts, answer=["x", "yab", "x", "x", None, "xa", "x"], kind=list("aabbccc"))
    scoring = {"reference": "answer", "metrics": ["exact_match", "contains"], "by": "kind"}
    options = {"max_model_len": 40}

    a, b = (
        run_job(
            make(name, explode=explode, eval=scoring, input={"on_null": "skip"}),
            engine=double(**options),
        )
        for name, explode in (("a", False), ("b", True))
    )

    assert counted(a) == counted(b)
    assert a.output.finish_reasons == {"stop": 4, "error": 1, "skipped": 2}
    exact = a.scores[0].overall
    # The first sample of each row counts, "x" of x and of xa too.
    assert (exact.correct, exact.scored) == (1, 4)


def test_an_exploded_row_is_scored_by_its_own_completion(write_rows, make, double, out):
    write_rows(q=["x"], answer=["xab"])
    scoring = {"reference": "answer", "metrics": ["exact_match"]}

    report = run_job(make(explode=True, eval=scoring), engine=double())

    assert [row["score_exact_match"] for row in rows(out)] == [False, False, True, False]
    assert report.scores[0].overall.correct == 0


@FORMS
def test_every_reader_sees_the_same_rows(write_rows, make, double, out, explode):
    write_rows(q=["x", None, "y"])
    spec = make(
        explode=explode,
        output={"token_ids": True},
        sampling={"logprobs": 2, "prompt_logprobs": 1},
    )

    run_job(spec, engine=double())

    found = by_pyarrow(out)
    assert len(found) == (12 if explode else 3)
    assert by_duckdb(out) == found
    assert by_pandas(out) == found


@FORMS
def test_a_resumed_job_has_the_bytes_of_one_that_ran_through(
    write_rows, make, double, tmp_path, explode
):
    write_rows(q=[None if i == 3 else f"q{i}" * (30 if i == 5 else 1) for i in range(11)])
    form: dict[str, Any] = {
        "explode": explode,
        "output": {"token_ids": True, "prompt": True, "journal_interval": 0.0},
        "sampling": {"logprobs": 3, "prompt_logprobs": 2, "max_tokens": 5},
    }
    options = {"max_model_len": 60, "num_steps": late_first}
    run_job(make("whole", **form), engine=double(**options))
    num_asked = 0
    for num_steps in (3, 4, 5):
        one = double(**options)
        with pytest.raises(JobInterrupted):
            run_job(make(**form), engine=one, should_stop=StopAfter(num_steps))
        num_asked += len(one.requests)
    last = double(**options)

    report = run_job(make(**form), engine=last)

    a, b = (tmp_path / name for name in ("whole", "out"))
    assert report.run.rows_resumed
    assert parts(a) == parts(b)
    for name in parts(a):
        assert pq.read_table(b / name).equals(pq.read_table(a / name))
    assert diff(store(a), store(b)).is_same
    assert not verify(store(b)).problems


@FORMS
def test_a_retry_redoes_whole_rows_and_no_others(write_rows, make, double, out, explode):
    write_rows(q=["a", "long", "b", "longer", "c", "d"])
    spec = make(explode=explode, output={"rows_per_part": 3}, sampling={"max_tokens": 9})

    def long(text: str, sample: int) -> str:
        return text * 2 if "long" in text and sample == 2 else text

    run_job(spec, engine=double(vary=long))
    before = rows(out)
    one = double(vary=lambda text, sample: f"again {sample}")

    report = retry_job(
        str(out),
        where="finish_reason = 'length'",
        settings=["sampling.max_tokens=50"],
        engine=one,
    )

    assert report is not None
    assert [request.request_id for request in one.requests] == [1, 3]
    after = rows(out)
    each = 4 if explode else 1
    changed = [i for i, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1]]
    assert changed == [*range(each, 2 * each), *range(3 * each, 4 * each)]
    redone = after[each : 2 * each]
    texts = [row["completion"] for row in redone] if explode else [
        one["text"] for one in redone[0]["completions"]
    ]  # fmt: skip
    assert texts == [f"again {sample}" for sample in range(4)]
    assert report.output.finish_reasons == {"stop": 6}
    assert report.run.rows == 2
    assert not verify(store(out)).problems
    assert status(store(out)).revisions[0].rows == 2


@pytest.mark.parametrize("name", ["n", "best_of", "logprobs", "prompt_logprobs", "beam_width"])
def test_a_retry_cannot_change_the_columns(write_rows, make, double, out, name):
    write_rows(q=["a", None])
    run_job(make(explode=True), engine=double())

    with pytest.raises(ConfigError, match=f"--set sampling.{name}: cannot change in a retry"):
        retry_job(
            str(out),
            where="finish_reason = 'error'",
            settings=[f"sampling.{name}=5"],
            engine=double(),
        )

    assert not verify(store(out)).problems
    assert status(store(out)).revisions == ()


@FORMS
def test_a_job_can_be_extended(write_rows, make, double, out, explode):
    write_rows("b.parquet", q=["a", "b", "c", "d", "e"])
    run_job(make(explode=explode), engine=double())
    write_rows("a.parquet", q=["new"])

    report = run_job(make(explode=explode), engine=double(), options=RunOptions(extends=True))

    assert report.output.rows == 6
    assert verify(store(out)).rows == 6
    assert not verify(store(out)).problems
    found = status(store(out))
    assert (found.state, found.rows, found.rows_committed) == ("finished", 6, 6)


def forge(out: pathlib.Path, change: Callable[[pa.Table], pa.Table]) -> None:
    """Replaces the first part by another of its unit, and makes its record agree with the file."""
    path, place = out / parts(out)[0], out / "_jaxpaged/commits/000000-r0.json"
    about, table = json.loads(place.read_text()), change(pq.read_table(path))
    names = ("start", "stop", "revision", "fingerprint")
    owner = Unit(index=0, **{name: about[name] for name in names})
    with part_file.open_writer(str(path), table.schema) as writer:
        writer.write_table(table)
        part_file.add_metadata(writer, owner, about["attempt"])
    with path.open("rb") as file:
        about |= {"sha256": part_file.sha256(file), "num_bytes": file.tell()}
    place.write_text(json.dumps(about))


def with_column(table: pa.Table, name: str, values: list) -> pa.Table:
    place = table.schema.get_field_index(name)
    return table.set_column(place, name, pa.array(values, table.schema.field(name).type))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table.slice(1), "has 15 rows, not 16"),
        (lambda table: table.slice(0, 4), "has 4 rows, not 16"),
        (
            lambda table: with_column(table, "sample", [0, 1, 2, 3] * 3 + [0, 1, 3, 2]),
            "has 2 rows whose sample is not the one that belongs there",
        ),
        (
            lambda table: pa.concat_tables([table.slice(4, 4), table.slice(0, 4), table.slice(8)]),
            "row 0 of it is rows.parquet, row group 0, row 1, where rows.parquet, row group 0, "
            "row 0 belongs",
        ),
        (
            lambda table: with_column(table, "finish_reason", ["length", *["stop"] * 15]),
            "comes to other rows by finish reason",
        ),
    ],
)
def test_verify_sees_what_is_wrong_with_exploded_rows(
    write_rows, make, double, out, change, message
):
    write_rows(q=list("abcdef"))
    spec = make(explode=True)
    run_job(spec, engine=double())
    assert verify(store(out)).exit_code == 0
    whole = rows(out)

    forge(out, change)

    texts = [problem.text for problem in verify(store(out)).problems]
    assert any(message in text for text in texts), texts
    run_job(spec, engine=double(), options=RunOptions(repairs=True))
    assert rows(out) == whole
    assert not verify(store(out)).problems


def test_a_folder_that_does_not_say_how_many_samples_a_row_has_is_refused(
    write_rows, make, double, out
):
    write_rows(q=["a"])
    run_job(make(explode=True), engine=double())
    place = out / "_jaxpaged/job.json"
    about = json.loads(place.read_text())
    about["result_keys"]["sampling.n"] = "many"
    place.write_text(json.dumps(about))

    with pytest.raises(OutputConflictError, match=r"its sampling.n is 'many'"):
        verify(store(out))


def test_diff_compares_exploded_rows_sample_by_sample(write_rows, make, double, tmp_path):
    write_rows(q=["a", "b", "c", "d", "e"])
    run_job(make("a", explode=True), engine=double())

    def other(text: str, sample: int) -> str:
        return "!" if (text, sample) in (("[b]", 1), ("[e]", 3)) else forced(text, sample)

    run_job(make("b", explode=True), engine=double(vary=other))
    run_job(make("c", explode=True, sampling={"n": 2}), engine=double())
    a, b, c = (store(tmp_path / name) for name in "abc")

    found = diff(a, b)
    assert (found.same, found.changed, found.only_in_a, found.only_in_b) == (18, 2, 0, 0)
    assert found.columns["completion"] == 2
    found = diff(a, c)
    assert (found.same, found.changed, found.only_in_a, found.only_in_b) == (10, 0, 10, 0)
    found = diff(c, b)
    assert (found.same, found.changed, found.only_in_a, found.only_in_b) == (9, 1, 0, 10)


def test_diff_compares_lists_row_by_row(write_rows, make, double, tmp_path):
    write_rows(q=["a", "b", "c"])
    run_job(make("a"), engine=double())
    run_job(
        make("b"),
        engine=double(vary=lambda text, i: forced(text, i) if text != "[b]" else "!"),
    )

    found = diff(store(tmp_path / "a"), store(tmp_path / "b"))

    assert (found.same, found.changed) == (2, 1)
    assert set(found.columns) == {"completions", "completion_tokens"}


def test_log_probabilities_are_written_as_they_are(write_rows, make, double, out):
    write_rows(q=["x", None])
    spec = make(explode=True, sampling={"n": 1, "logprobs": 3, "prompt_logprobs": 1})

    run_job(spec, engine=double(answer=lambda text: "ab"))

    row, failed = rows(out)
    assert row["cumulative_logprob"] == -0.125 - 0.25
    top = [{"token_id": 1, "logprob": 0.0}, {"token_id": 0, "logprob": -0.125}]
    top.append({"token_id": 2, "logprob": float("-inf")})
    assert row["logprobs"][0] == {"token_id": 0, "logprob": -0.125, "rank": 2, "top": top}
    assert len(row["logprobs"]) == 2
    first, second = row["prompt_logprobs"]
    assert (first["logprob"], first["rank"], first["top"]) == (None, None, [])
    assert second["logprob"] is not None
    assert len(second["top"]) == 1
    assert (failed["logprobs"], failed["prompt_logprobs"]) == (None, None)
    assert failed["cumulative_logprob"] is None


def test_beams_have_scores(write_rows, make, double, out):
    write_rows(q=["x"])
    beams = {"n": 2, "beam_width": 3, "temperature": 0.0}

    run_job(make(sampling=beams), engine=double())

    one, two = rows(out)[0]["completions"]
    assert one["score"] == one["cumulative_logprob"] / one["completion_tokens"]
    assert two["score"] is not None
    assert "logprobs" not in one


@FORMS
def test_skipped_rows_are_no_errors(write_rows, make, double, out, explode):
    write_rows(q=["x", None, "y" * 50], answer=["x"] * 3)
    spec = make(
        explode=explode,
        input={"on_null": "skip", "on_too_long": "skip"},
        engine={"max_model_len": 40},
        eval={"reference": "answer", "metrics": ["exact_match"]},
        max_errors=0,
    )
    one = double()

    report = run_job(spec, engine=one)

    each = 4 if explode else 1
    found = rows(out)
    assert [row["finish_reason"] for row in found] == [
        *["stop"] * each, *["skipped"] * 2 * each,
    ]  # fmt: skip
    name = "completion" if explode else "completions"
    for row, reason in ((found[each], "null_prompt"), (found[-1], "prompt_too_long")):
        assert row["stop_reason"] == reason
        assert (row[name], row["error_code"], row["error_message"]) == (None, None, None)
        assert (row["completion_tokens"], row["score_exact_match"]) == (0, None)
    assert [request.request_id for request in one.requests] == [0]
    assert (report.num_errors, report.output.num_skipped) == (0, 2)
    assert report.run.rows_skipped == 2
    assert not any("score" in warning for warning in report.warnings)
    assert "rows skipped 2" in shown(report)
    assert status(store(out)).finish_reasons == {"stop": 1, "skipped": 2}
    assert not verify(store(out)).problems


@FORMS
def test_what_was_cut_out_of_prompts_is_counted(write_rows, make, double, out, explode):
    write_rows(q=["x", "y" * 50, "z" * 51, None])
    spec = make(
        explode=explode,
        input={"on_too_long": "truncate_left"},
        engine={"max_model_len": 40},
        sampling={"max_tokens": 10},
    )

    report = run_job(spec, engine=double())

    each = 4 if explode else 1
    cut = [row["truncated_tokens"] for row in rows(out)[::each]]
    assert (cut[0], cut[3]) == (0, 0)
    assert cut[2] == cut[1] + 1 > 1
    assert report.output.truncated_prompts == 2
    assert report.output.truncated_tokens == sum(cut)
    assert f"prompts cut 2, by {sum(cut)} tokens" in shown(report)
    assert not verify(store(out)).problems


def shown(report: JobReport) -> str:
    text = io.StringIO()
    report_table.show(report, rich.console.Console(file=text, width=200))
    return " ".join(text.getvalue().split())


def test_a_column_of_the_input_cannot_be_named_like_the_cuts(write_rows, make, double):
    write_rows(q=["x"], truncated_tokens=[1])

    with pytest.raises(InputSchemaError, match="truncated_tokens"):
        run_job(make(), engine=double())


def test_an_engine_whose_blocks_do_not_add_up_fails_the_job(write_rows, make, double, out):
    write_rows(q=["x"])
    one = double()

    def broken() -> None:
        raise AssertionError("9 of 8 blocks")

    one.check_integrity = broken
    with pytest.raises(AssertionError, match="9 of 8 blocks"):
        run_job(make(), engine=one)

    assert status(store(out)).state == "failed"
    assert run_job(make(), engine=double()).state == "finished"


def test_samples_out_of_order_are_the_engine_s_fault(write_rows, make, double):
    write_rows(q=["x"])
    one = double()
    complete = one.step

    def swapped():
        first, second, *others = complete()
        return [second, first, *others]

    one.step = swapped
    with pytest.raises(AssertionError, match=r"samples \[1, 0, 2, 3\], not \[0, 1, 2, 3\]"):
        run_job(make(), engine=one)


def test_the_samples_shown_to_people_are_the_first_ones(write_rows, make, double):
    write_rows(q=["x", "y"])

    report = run_job(make(), engine=double())

    assert [dataclasses.astuple(one)[1:] for one in report.samples] == [("x", "x"), ("y", "y")]
