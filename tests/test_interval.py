import math

import pytest

from jaxpaged.interval import Interval


@pytest.mark.parametrize(
    ("interval", "inside", "outside", "words", "keywords"),
    [
        (Interval(least=2), [2, 2.5, 10**30], [1, -5], "at least 2", {"minimum": 2}),
        (
            Interval(above=0, most=1),
            [0.001, 1],
            [0, 1.001],
            "above 0 and at most 1",
            {"exclusiveMinimum": 0, "maximum": 1},
        ),
        (
            Interval(least=-10_000, most=10_000),
            [-10_000, 0, 1e4],
            [10_001, -math.inf, math.inf],
            "from -10,000 to 10,000",
            {"minimum": -10_000, "maximum": 10_000},
        ),
        (
            Interval(least=0, below=1),
            [0, 0.99],
            [1, -0.1],
            "at least 0 and below 1",
            {"minimum": 0, "exclusiveMaximum": 1},
        ),
        (Interval(most=3, words="few"), [3, -1e9], [4], "few", {"maximum": 3}),
    ],
    ids=str,
)
def test_what_lies_in_a_range_and_how_it_is_told(interval, inside, outside, words, keywords):
    assert [value for value in inside if value not in interval] == []
    assert [value for value in (*outside, math.nan, None) if value in interval] == []
    assert str(interval) == words
    assert interval.json_schema() == keywords


def test_none_lies_only_where_it_is_said_to():
    assert None in Interval(least=1, has_none=True)
    assert 0 not in Interval(least=1, has_none=True)
