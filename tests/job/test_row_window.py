import pyarrow as pa
import pytest

from jaxpaged.job.input.row_batch import RowBatch
from jaxpaged.job.row_window import RowResult, RowWindow, SampleResult
from jaxpaged.job.token_logprobs import TokenLogprobs
from jaxpaged.job.units import Unit
from jaxpaged.request import TokenLogprob


def batch(unit: Unit, start: int, num_rows: int) -> RowBatch:
    return RowBatch(
        unit=unit,
        start=start,
        file="a",
        row_group=0,
        first_index=start,
        cells=pa.record_batch({"id": list(range(start, start + num_rows))}),
        invalid={},
    )


def result(row: int) -> RowResult:
    return RowResult(samples=(SampleResult(text=str(row), finish_reason="stop"),))


@pytest.fixture
def window() -> RowWindow:
    """Two units of four rows, in batches of two."""
    window = RowWindow(max_rows=8, max_bytes=10**6, slice_rows=100)
    for index in range(2):
        unit = Unit(index=index, start=4 * index, stop=4 * index + 4)
        window.add(batch(unit, 4 * index, 2))
        window.add(batch(unit, 4 * index + 2, 2))
    return window


def completions(taken) -> list[str]:
    return [row.samples[0].text for finished in taken for row in finished.results]


def test_rows_leave_in_order_whatever_the_order_of_results():
    window = RowWindow(max_rows=100, max_bytes=10**6, slice_rows=100)
    unit = Unit(index=0, start=0, stop=4)
    window.add(batch(unit, 0, 2))
    window.add(batch(unit, 2, 2))

    for row in (3, 2, 1):
        window.set_result(row, result(row))
        assert window.take() == []
    window.set_result(0, result(0))

    assert completions(window.take()) == ["0", "1", "2", "3"]
    assert len(window) == 0


def test_a_take_stays_within_one_unit(window):
    for row in range(8):
        window.set_result(row, result(row))

    assert completions(window.take()) == ["0", "1", "2", "3"]
    assert completions(window.take()) == ["4", "5", "6", "7"]
    assert window.take() == []


def test_a_full_window_gives_up_its_head_early(window):
    assert window.is_full
    window.set_result(0, result(0))
    window.set_result(1, result(1))

    assert completions(window.take()) == ["0", "1"]
    assert not window.is_full
    assert window.take() == []


def test_a_window_is_full_by_bytes(window):
    small = RowWindow(max_rows=100, max_bytes=10, slice_rows=100)
    assert not small.is_full
    small.add(batch(Unit(index=0, start=0, stop=2), 0, 2))
    assert small.is_full


def test_a_window_is_full_by_the_bytes_of_results():
    unit = Unit(index=0, start=0, stop=4)
    window = RowWindow(max_rows=100, max_bytes=1000, slice_rows=100)
    window.add(batch(unit, 0, 2))
    window.add(batch(unit, 2, 2))
    scored = TokenLogprobs.pack([TokenLogprob(token_id=1, logprob=-1.0, rank=1)] * 40)
    sample = SampleResult(text="x" * 300, finish_reason="stop", logprobs=scored)
    window.set_result(0, RowResult(samples=(sample,)))
    assert not window.is_full
    window.set_result(1, RowResult(samples=(sample,)))
    assert window.is_full

    assert [row.samples for one in window.take() for row in one.results] == [(sample,)] * 2
    assert not window.is_full


def test_many_finished_rows_leave_before_their_unit_ends():
    window = RowWindow(max_rows=100, max_bytes=10**6, slice_rows=4)
    unit = Unit(index=0, start=0, stop=10)
    for start in (0, 2, 4):
        window.add(batch(unit, start, 2))
    for row in (0, 1, 2):
        window.set_result(row, result(row))
    assert window.take() == []
    window.set_result(3, result(3))

    assert completions(window.take()) == ["0", "1", "2", "3"]


def test_a_row_has_one_result(window):
    window.set_result(0, result(0))
    with pytest.raises(KeyError):
        window.set_result(0, result(0))
