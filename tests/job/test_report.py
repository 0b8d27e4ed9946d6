import dataclasses
import io
import json

import pytest
import rich.console

from jaxpaged.job import report, report_table
from jaxpaged.job.feeder import Sample
from jaxpaged.job.report import JobReport, OutputFacts, RunFacts
from jaxpaged.job.spec import JobSpec
from jaxpaged.job.tally import ErrorCount, MetricScore, RowError, ScoreCount


@pytest.fixture
def full() -> JobReport:
    return JobReport(
        state="finished",
        input_rows=10,
        output=OutputFacts(
            path="/out",
            parts=2,
            rows=10,
            finish_reasons={"stop": 5, "length": 3, "error": 2},
            prompt_tokens=1000,
            completion_tokens=2000,
            cached_tokens=250,
            partial_characters=1,
        ),
        errors=(
            ErrorCount(
                code="bad_type",
                count=2,
                examples=(RowError(file="a", row_group=0, index=3, message="why"),),
            ),
        ),
        scores=(
            MetricScore(
                metric="contains",
                overall=ScoreCount(correct=3, scored=8),
                by={"x": ScoreCount(correct=0, scored=0)},
            ),
        ),
        run=RunFacts(
            attempt=3,
            revision=1,
            parts_kept=1,
            parts_adopted=1,
            rows=3,
            rows_resumed=2,
            load_seconds=1.5,
            seconds=20.0,
            engine={
                "prefill_tokens": 500,
                "prefill_seconds": 2.0,
                "decode_tokens": 100,
                "decode_seconds": 0.0,
                "device": "cpu",
                "compile_seconds": 3.0,
                "recomputes": 2,
                "swaps": 3,
                "host_seconds": float("nan"),
            },
        ),
        warnings=("look here",),
        job={"seed": 0},
        versions={"jaxpaged": "1"},
        samples=(Sample(row="a, row 0", preview="Q\n\x1b[31m", completion="A\x07 " + "x" * 300),),
    )


def test_json_round_trips_without_samples_and_without_nan(full):
    text = json.dumps(full.to_json(), allow_nan=False)

    again = report.from_json(json.loads(text))

    engine = full.run.engine | {"host_seconds": None}
    assert again == dataclasses.replace(
        full, samples=(), run=dataclasses.replace(full.run, engine=engine)
    )
    assert json.loads(text)["scores"][0]["overall"]["mean"] == 0.375
    assert json.loads(text)["scores"][0]["by"]["x"]["mean"] is None


@pytest.mark.parametrize("value", [None, {}, [], {"state": "finished"}])
def test_anything_else_is_no_report(value):
    assert report.from_json(value) is None


def test_speed_is_tokens_over_the_phase_s_own_time(full):
    assert full.run.tokens_per_second("prefill") == 250.0
    assert full.run.tokens_per_second("decode") is None
    assert RunFacts().tokens_per_second("decode") is None


@pytest.mark.parametrize(
    ("output", "input_rows", "scored", "expected"),
    [
        ({"rows": 20, "finish_reasons": {"stop": 20}}, 20, 20, ()),
        ({"rows": 0, "finish_reasons": {}}, 0, 0, ("the input has no rows",)),
        (
            {"rows": 4, "finish_reasons": {"error": 4}},
            4,
            4,
            ("100% of the rows failed; see their error_code and error_message",),
        ),
        (
            {"rows": 9, "finish_reasons": {"stop": 9}},
            9,
            7,
            (
                "2 of 9 rows have no contains score: their reference (answer) cannot be compared "
                "with",
            ),
        ),
    ],
    ids=["nothing", "no rows", "all failed", "not scored"],
)
def test_what_a_user_should_look_at_is_warned_of(full, output, input_rows, scored, expected):
    spec = JobSpec.from_dict(
        {
            "model": "m",
            "input": {"path": "a", "prompt": "b"},
            "output": {"path": "c"},
            "eval": {"reference": "answer", "metrics": ["contains"]},
        }
    )
    score = MetricScore(metric="contains", overall=ScoreCount(correct=0, scored=scored), by={})

    found = report.warnings(
        dataclasses.replace(full.output, **output),
        RunFacts(),
        spec,
        input_rows=input_rows,
        scores=(score,),
    )

    assert found == expected


def test_parts_that_are_made_again_are_warned_of(full):
    spec = JobSpec.from_dict(
        {"model": "m", "input": {"path": "a", "prompt": "b"}, "output": {"path": "c"}}
    )
    output = dataclasses.replace(full.output, finish_reasons={"stop": 10})

    found = report.warnings(output, RunFacts(parts_discarded=2), spec, input_rows=10, scores=())

    assert found == ("2 parts of earlier runs were not whole and are replaced",)


def test_a_run_without_earlier_ones_says_nothing_of_them(full):
    text = io.StringIO()
    alone = dataclasses.replace(full, run=RunFacts(attempt=1, rows=10))

    report_table.show(alone, rich.console.Console(file=text, width=120))

    assert "10 of 10\n" in "".join(line.rstrip() + "\n" for line in text.getvalue().splitlines())


def test_the_table_says_everything_on_plain_lines(full):
    text = io.StringIO()

    report_table.show(full, rich.console.Console(file=text, width=120))

    shown = text.getvalue()
    for expected in (
        "10 of 10 (3 in this run, 7 resumed)",
        "bad_type",
        "2, first in a, row group 0, row 3: why",
        "1,000 in, 2,000 out",
        "250 of 1,000 prompt tokens came from the cache (25.0%)",
        "2 by recompute, 3 by swap",
        "prefill 250",
        "20.0 s (3.0 s of it to compile), after 1.5 s to load the model",
        "30.0% of the rows",
        "37.5% (3 of 8)",
        "not scored (0 of 0)",
        "/out",
        "warning: look here",
    ):
        assert expected in shown
    assert "\x1b" not in shown
    assert "\x07" not in shown
    [sample] = [line for line in shown.splitlines() if " -> " in line]
    assert len(sample) < 160


def test_a_page_is_named_where_there_is_one(full):
    for has_page in (False, True):
        text = io.StringIO()
        shown = dataclasses.replace(full, has_page=has_page)
        report_table.show(shown, rich.console.Console(file=text, width=120))
        assert ("/out/_jaxpaged/report.html" in text.getvalue()) is has_page
        assert "/out/_jaxpaged/report.json" in text.getvalue()


def test_what_may_be_worth_knowing_is_noted(full):
    cut = dataclasses.replace(full.output, truncated_prompts=2, truncated_tokens=1500)

    assert report.notes(cut, unused_columns=["id", "lang"]) == (
        "input columns that are carried along, and used by neither prompts, parameters nor scores: "
        "id, lang",
        "2 prompts were cut, by 1,500 tokens (input.on_too_long)",
        "1 rows have a completion that was cut inside a character",
    )
    nothing = dataclasses.replace(full.output, partial_characters=0)
    assert report.notes(nothing, unused_columns=[]) == ()


def test_rows_that_were_skipped_lack_no_score(full):
    spec = JobSpec.from_dict(
        {"model": "m", "input": {"path": "a", "prompt": "b"}, "output": {"path": "c"}}
    )
    output = dataclasses.replace(full.output, finish_reasons={"stop": 8, "skipped": 2})

    found = report.warnings(output, RunFacts(), spec, input_rows=10, scores=full.scores)

    assert found == ()
