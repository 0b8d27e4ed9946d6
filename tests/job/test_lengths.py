import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.job import lengths

_LENGTHS = st.lists(st.integers(0, 200_000), min_size=1, max_size=60)


@given(st.integers(0, 10**7))
def test_a_range_begins_at_its_name_and_holds_its_lengths(length):
    first, width = lengths.first_of(length), lengths.width_of(length)

    assert first <= length < first + width
    assert lengths.first_of(first) == first
    assert lengths.first_of(first + width - 1) == first
    assert lengths.first_of(first + width) == first + width
    assert width == 1 or width <= first / 16


@given(_LENGTHS, _LENGTHS)
def test_counts_of_parts_add_up(one, other):
    both = lengths.count(np.array([*one, *other]))
    assert lengths.count(np.array(one)) + lengths.count(np.array(other)) == both
    assert both.total() == len(one) + len(other)


@given(_LENGTHS)
def test_bars_of_one_width_hold_every_length_but_the_few_far_ones(found):
    bars = lengths.histogram(lengths.count(np.array(found)))

    assert sum(bars.counts) + bars.num_beyond == len(found)
    assert len(bars.edges) == len(bars.counts) + 1 <= 65
    assert len(set(np.diff(bars.edges))) == 1
    inside = [length for length in found if length < bars.edges[-1]]
    expected, _ = np.histogram(inside, bars.edges)
    assert list(expected[:-1]) == list(bars.counts[:-1])
    assert bars.num_beyond == len(found) - len(inside)


def test_a_few_lengths_far_beyond_the_others_do_not_squeeze_them():
    bars = lengths.histogram(lengths.count(np.array([20] * 999 + [100_000])))
    assert (bars.num_beyond, bars.edges[-1]) == (1, 21)
    bars = lengths.histogram(lengths.count(np.array([20] * 999 + [30])))
    assert (bars.num_beyond, bars.edges[-1]) == (0, 31)


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1), (0.5, 2), (0.9, 9), (1.0, 9)])
def test_quantiles(share, expected):
    counts = lengths.count(np.array([1, 2, 2, 9]))
    assert lengths.quantile(counts, share) == expected


def test_of_nothing_there_is_a_histogram_too():
    assert lengths.quantile({}, 0.5) == 0
    assert sum(lengths.histogram({}).counts) == 0
    assert lengths.count(np.array([-3])) == {0: 1}
