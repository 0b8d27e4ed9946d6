import math

from jaxpaged.histogram import Histogram


def test_a_value_counts_in_the_bucket_whose_bound_it_does_not_exceed() -> None:
    histogram = Histogram(bounds=[0.1, 1.0])
    for value in (0.0, 0.1, 0.11, 1.0, 7.0, math.inf):
        histogram.add(value)

    assert histogram.counts == [2, 2, 2]
    assert histogram.cumulative() == [(0.1, 2), (1.0, 4), (math.inf, 6)]


def test_a_new_one_is_empty_and_its_own() -> None:
    first, second = Histogram(bounds=[1.0]), Histogram(bounds=[1.0])
    first.add(0.5)

    assert second.cumulative() == [(1.0, 0), (math.inf, 0)]
