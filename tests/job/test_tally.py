import pyarrow as pa

from jaxpaged.job import tally
from jaxpaged.job.sections import EvalSpec
from jaxpaged.job.tally import RowError, ScoreCount, Tally


def table(**values):
    rows = len(next(iter(values.values())))
    full = {
        "finish_reason": ["stop"] * rows,
        "error_code": pa.array([None] * rows, pa.string()),
        "error_message": pa.array([None] * rows, pa.string()),
        "row": [{"file": "a", "row_group": 0, "index": i} for i in range(rows)],
        "prompt_tokens": pa.array([2] * rows, pa.int32()),
        "completion_tokens": pa.array([3] * rows, pa.int32()),
        "cached_tokens": pa.array([0] * rows, pa.int32()),
        "ends_in_partial_character": [False] * rows,
    }
    return pa.table(full | values)


def test_counts_add_up_over_tables():
    counts = Tally(None)
    counts.add(
        table(
            finish_reason=["stop", "error", "length"],
            error_code=[None, "null_prompt", None],
            error_message=[None, "why", None],
            prompt_tokens=pa.array([1, None, 3], pa.int32()),
            ends_in_partial_character=[False, False, True],
        )
    )
    counts.add(table(finish_reason=["error"] * 5, error_code=["timeout"] * 5))

    assert counts.num_rows == 8
    assert counts.num_errors == 6
    assert counts.finish_reasons == {"stop": 1, "length": 1, "error": 6}
    assert counts.tokens == {"prompt": 14, "completion": 24, "cached": 0}
    assert counts.num_partial_characters == 1
    timeouts, nulls = counts.errors()
    assert (timeouts.code, timeouts.count, len(timeouts.examples)) == ("timeout", 5, 3)
    assert nulls.examples == (RowError(file="a", row_group=0, index=1, message="why"),)
    assert counts.examples()[0] == "a, row group 0, row 1: null_prompt (why)"


def test_failed_rows_are_found_beside_columns_that_arrow_cannot_filter():
    counts = Tally(EvalSpec(reference="r", metrics=("contains",), by="kind"))
    kinds = pa.array(["a", "b"], pa.string_view())
    counts.add(table(score_contains=[True, False], kind=kinds, error_code=[None, "timeout"]))

    assert counts.num_errors == 1
    assert counts.scores()[0].by["b"] == ScoreCount(correct=0, scored=1)


def test_scores_are_means_over_scored_rows_also_by_group():
    counts = Tally(EvalSpec(reference="r", metrics=("contains",), by="kind"))
    counts.add(table(score_contains=[True, False, None, True], kind=["a", "a", "b", None]))
    counts.add(table(score_contains=[False], kind=["b"]))

    [score] = counts.scores()

    assert score.metric == "contains"
    assert score.overall == ScoreCount(correct=2, scored=4)
    assert score.overall.mean == 0.5
    assert score.by == {
        "(null)": ScoreCount(correct=1, scored=1),
        "a": ScoreCount(correct=1, scored=2),
        "b": ScoreCount(correct=0, scored=1),
    }


def test_groups_are_bounded():
    counts = Tally(EvalSpec(reference="r", metrics=("contains",), by="kind"))
    num = tally.MAX_GROUPS + 50
    counts.add(table(score_contains=[True] * num, kind=[f"{i:04d}" for i in range(num)]))

    [score] = counts.scores()

    assert len(score.by) == tally.MAX_GROUPS + 1
    assert score.by[tally.OTHER_GROUPS] == ScoreCount(correct=50, scored=50)
    assert score.overall.correct == num


def test_nothing_scored_has_no_mean():
    counts = Tally(EvalSpec(reference="r", metrics=("contains",)))
    counts.add(table(score_contains=pa.array([None], pa.bool_())))

    assert counts.scores()[0].overall.mean is None
    assert counts.scores()[0].by == {}
