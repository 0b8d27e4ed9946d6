import dataclasses
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pydantic

from jaxpaged.job import tally
from jaxpaged.job.sections import EvalSpec
from jaxpaged.job.tally import Counts, RowError, ScoreCount, Tally


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
    assert counts.prompt_lengths == {1: 1, 2: 5, 3: 1}
    assert counts.completion_lengths == {3: 2}
    timeouts, nulls = counts.errors()
    assert (timeouts.code, timeouts.count, len(timeouts.examples)) == ("timeout", 5, 3)
    assert nulls.examples == (RowError(file="a", row_group=0, index=1, message="why"),)
    assert counts.examples()[0] == "a, row group 0, row 1: null_prompt"


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


def test_what_was_counted_part_by_part_is_what_is_counted_at_once(tmp_path):
    scoring = EvalSpec(reference="r", metrics=("contains", "exact_match"), by="kind")
    numbers = range(40)
    whole = table(
        score_contains=[None if i % 7 == 3 else i % 2 == 0 for i in numbers],
        score_exact_match=[i % 3 == 0 for i in numbers],
        kind=["ab"[i % 2] if i % 5 else None for i in numbers],
        finish_reason=["error" if i % 4 == 0 else "length" for i in numbers],
        error_code=[["timeout", "bad_type"][i % 8 // 4] if i % 4 == 0 else None for i in numbers],
        error_message=[f"why {i}" if i % 4 == 0 else None for i in numbers],
        row=[{"file": "a", "row_group": 0, "index": i} for i in numbers],
        ends_in_partial_character=[i % 9 == 0 for i in numbers],
    )
    once, added = Tally(scoring), Tally(scoring)
    once.add(whole)
    for start in range(0, 40, 7):
        pq.write_table(whole.slice(start, 7), tmp_path / "part", row_group_size=2)
        part = Tally(scoring)
        part.add_part(tmp_path / "part")
        # As a commit record keeps it.
        stored = json.loads(json.dumps(dataclasses.asdict(part.counts()), allow_nan=False))
        added.add_counts(pydantic.TypeAdapter(Counts).validate_python(stored))

    assert added.num_rows == once.num_rows == 40
    assert added.num_errors == 10
    assert added.finish_reasons == once.finish_reasons
    assert added.tokens == once.tokens
    assert added.num_partial_characters == once.num_partial_characters == 5
    assert added.errors() == once.errors()
    assert added.examples() == once.examples()
    assert added.scores() == once.scores()


def test_groups_stay_bounded_over_parts():
    scoring = EvalSpec(reference="r", metrics=("contains",), by="kind")
    added = Tally(scoring)
    for half in ("x", "y"):
        part = Tally(scoring)
        kinds = [f"{half}{i:04d}" for i in range(tally.MAX_GROUPS)]
        part.add(table(score_contains=[True] * tally.MAX_GROUPS, kind=kinds))
        added.add_counts(part.counts())

    [score] = added.scores()

    assert len(score.by) == tally.MAX_GROUPS + 1
    assert score.by[tally.OTHER_GROUPS] == ScoreCount(correct=100, scored=100)
    assert score.overall.correct == 200


def test_rows_with_several_completions_count_once_however_they_are_cut():
    rows = table(
        finish_reason=["stop", "length", "stop"] + ["error"] * 3 + ["skipped"] * 3 + ["stop"] * 3,
        error_code=[None] * 3 + ["timeout"] * 3 + [None] * 6,
        completion_tokens=pa.array([1, 2, 3, 0, 0, 0, 0, 0, 0, 4, 5, 6], pa.int32()),
        ends_in_partial_character=[False, True, True] + [False] * 9,
        truncated_tokens=pa.array([7] * 3 + [0] * 9, pa.int32()),
        score_contains=[
            True,
            False,
            False,
            False,
            False,
            False,
            None,
            None,
            None,
            False,
            True,
            True,
        ],
        kind=["a"] * 9 + ["b"] * 3,
    )
    scoring = EvalSpec(reference="r", metrics=("contains",), by="kind")

    for size in (1, 2, 3, 4, 5, 12):
        found = Tally(scoring, 3)
        for start in range(0, 12, size):
            found.add(rows.slice(start, size))

        counts = found.counts()
        assert counts.rows == 4
        assert counts.finish_reasons == {"length": 1, "error": 1, "skipped": 1, "stop": 1}
        assert counts.tokens == {"prompt": 8, "completion": 21, "cached": 0}
        assert (counts.partial_characters, found.num_errors) == (1, 1)
        assert [row.index for row in counts.examples["timeout"]] == [3]
        assert (counts.truncated_prompts, counts.truncated_tokens) == (1, 7)
        assert counts.prompt_lengths == {2: 4}
        assert counts.completion_lengths == {6: 1, 15: 1}
        [score] = found.scores()
        assert score.overall == ScoreCount(correct=1, scored=3)
        assert score.by["b"] == ScoreCount(correct=0, scored=1)


def test_cuts_are_counted_where_the_column_is_there():
    names = ["finish_reason", "truncated_tokens"]

    assert "truncated_tokens" in Tally(None).columns_of(pa.schema([(n, pa.int32()) for n in names]))
    assert "truncated_tokens" not in Tally(None).columns_of(pa.schema([("id", pa.int32())]))
