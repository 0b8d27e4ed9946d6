import pyarrow as pa
import pytest
from file_records import file
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.job.input.file_record import FileRecord
from jaxpaged.job.output import row_addresses
from jaxpaged.job.output.row_addresses import RowAddresses
from jaxpaged.job.result_columns import ROW_TYPE


def addresses(files: list[FileRecord]) -> list[tuple[str, int, int]]:
    """The dull way: one row after the other."""
    found = []
    for one in files:
        lengths = [rows for rows, count in one.row_groups for _ in range(count)]
        for group, length in enumerate(lengths):
            found += [(one.name, group, index) for index in range(length)]
    return found


def listed(rows: pa.StructArray) -> list[tuple[str, int, int]]:
    return [(row["file"], row["row_group"], row["index"]) for row in rows.to_pylist()]


_RUNS = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 3)), max_size=4)


@settings(deadline=None)
@given(runs=st.lists(_RUNS, max_size=4), data=st.data())
def test_any_range_of_rows_has_the_addresses_that_counting_gives(runs, data):
    files = [file(f"{place}.parquet", *run) for place, run in enumerate(runs)]
    expected = addresses(files)
    start = data.draw(st.integers(0, len(expected)))
    stop = data.draw(st.integers(start, len(expected)))

    found = RowAddresses(files).of(start, stop)

    assert found.type == ROW_TYPE
    assert listed(found) == expected[start:stop]


@pytest.mark.parametrize("change", ["swap", "null", "field", "type"])
def test_the_first_row_in_a_wrong_place_is_found(change):
    right = RowAddresses([file("a", (2, 2)), file("b", (3, 1))])
    rows = right.of(1, 7).to_pylist()
    match change:
        case "swap":
            rows[3], rows[4] = rows[4], rows[3]
        case "null":
            rows[3] = None
        case "field":
            rows[3] = {**rows[3], "index": None}
        case "type":
            assert right.first_wrong(1, pa.array([row["file"] for row in rows])) == 0
            return

    assert right.first_wrong(1, pa.array(rows, ROW_TYPE)) == 3
    assert right.first_wrong(1, right.of(1, 7)) is None
    assert right.first_wrong(0, right.of(1, 7)) == 0


def test_an_address_reads_well():
    rows = RowAddresses([file("a.parquet", (2, 2))]).of(3, 4)
    assert row_addresses.describe(rows[0]) == "a.parquet, row group 1, row 1"


def test_each_row_may_have_several_rows_of_the_output():
    files = [file("a", (2, 1)), file("b", (1, 1))]
    once, thrice = RowAddresses(files), RowAddresses(files, 3)

    expected = [address for address in once.of(0, 3).to_pylist() for _ in range(3)]

    assert thrice.of(0, 9).to_pylist() == expected
    assert thrice.of(4, 8).to_pylist() == expected[4:8]
    assert thrice.first_wrong(4, thrice.of(4, 8)) is None
    assert thrice.first_wrong(3, thrice.of(4, 8)) == 2
