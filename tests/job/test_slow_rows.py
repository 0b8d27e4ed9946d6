import random

from jaxpaged.job.slow_rows import SlowRow, SlowRows


def row(index: int, seconds: float) -> SlowRow:
    return SlowRow(
        file="a",
        row_group=0,
        index=index,
        seconds=seconds,
        prompt_tokens=1,
        completion_tokens=2,
    )


def test_the_slowest_are_kept_in_order():
    rows = [row(index, seconds=index / 7) for index in range(1000)]
    expected = tuple(rows[:-5:-1])
    random.Random(0).shuffle(rows)
    kept = SlowRows(max_rows=4)

    for one in rows:
        kept.add(one)

    assert kept.slowest() == expected


def test_of_equally_slow_ones_the_first_are_kept():
    kept = SlowRows(max_rows=2)
    for index in range(5):
        kept.add(row(index, seconds=1.0))
    assert [one.index for one in kept.slowest()] == [0, 1]


def test_there_may_be_none():
    assert SlowRows().slowest() == ()
