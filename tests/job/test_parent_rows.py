import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxpaged.errors import StorageError
from jaxpaged.job.filter.row_filter import RowFilter
from jaxpaged.job.output import parent_rows
from jaxpaged.job.output.output_view import PRIVATE
from jaxpaged.job.output.parent_rows import ParentRows
from jaxpaged.job.units import Unit
from jaxpaged.storage.local_store import LocalStore

SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("kind", pa.dictionary(pa.int32(), pa.string())),
        ("nested", pa.struct([("a", pa.list_(pa.float64()))])),
        ("text", pa.large_string()),
    ]
)
UNITS = [
    Unit(index=index, start=10 * index, stop=min(10 * index + 10, 35), revision=1)
    for index in range(4)
]


def table(start: int, stop: int, text: str) -> pa.Table:
    """Rows whose cells tell where they come from; dictionaries begin with another word each."""
    ids = range(start, stop)
    columns = {
        "id": pa.array(ids),
        "kind": pa.array([f"{text}{i % 3}" for i in ids]).dictionary_encode(),
        "nested": pa.array([{"a": [float(i), None]} if i % 4 else None for i in ids]),
        "text": pa.array([text if i % 5 else None for i in ids], pa.large_string()),
    }
    arrays = [columns[field.name].cast(field.type) for field in SCHEMA]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


@pytest.fixture
def store(tmp_path) -> LocalStore:
    """Four parts in small row groups."""
    for unit in UNITS:
        part = table(unit.start, unit.stop, "old").replace_schema_metadata({"whose": "ours"})
        pq.write_table(part, tmp_path / unit.part_name, row_group_size=3)
    return LocalStore(tmp_path, private=PRIVATE)


def chosen(where: str) -> RowFilter:
    return RowFilter.parse(where, SCHEMA)


def test_chosen_rows_are_counted_by_unit(store):
    def count(where: str) -> dict[int, int]:
        return parent_rows.count_chosen(store, UNITS, chosen(where))

    assert count("id IN (0, 3, 34)") == {0: 2, 3: 1}
    assert count("id >= 0") == {0: 10, 1: 10, 2: 10, 3: 5}
    assert count("id < 0") == {}
    assert count("text IS NULL AND kind = 'old0'") == {0: 1, 1: 1, 3: 1}
    assert parent_rows.count_chosen(store, UNITS[1:2], chosen("id >= 0")) == {1: 10}


def test_rows_are_told_apart_by_their_global_index(store):
    # Units that are left out lie between.
    rows = ParentRows(store, [UNITS[1], UNITS[3]], chosen("id = 10 OR id = 19 OR id = 34"))

    kept = {row: rows.is_kept(row) for row in [*range(30, 35), *range(10, 20)]}

    assert [row for row in kept if not kept[row]] == [34, 10, 19]


@pytest.mark.parametrize("sizes", [[10], [4, 6], [1, 8, 1], [3, 3, 3, 1]], ids=str)
def test_chosen_rows_take_the_place_of_the_old_ones(store, sizes):
    rows = ParentRows(store, [UNITS[1]], chosen("id IN (10, 13, 14, 19)"))
    for row in range(10, 20):
        rows.is_kept(row)

    pieces, start = [], 10
    for size in sizes:
        made = table(start, start + size, "new")
        pieces.append(rows.merged(UNITS[1], start, made))
        start += size
    found = pa.concat_tables(pieces)

    old, new = table(10, 20, "old").to_pylist(), table(10, 20, "new").to_pylist()
    expected = [new[i] if i in (0, 3, 4, 9) else old[i] for i in range(10)]
    assert found.to_pylist() == expected
    assert found.schema.equals(SCHEMA, check_metadata=True)


@pytest.mark.parametrize(("where", "text"), [("id >= 0", "new"), ("id < 0", "old")])
def test_all_or_none_may_be_chosen(store, where, text):
    rows = ParentRows(store, UNITS, chosen(where))
    assert {rows.is_kept(row) for row in range(30, 35)} == {text == "old"}

    found = rows.merged(UNITS[3], 30, table(30, 35, "new"))

    assert found.to_pylist() == table(30, 35, text).to_pylist()


def test_a_unit_that_is_committed_is_read_anew(store):
    rows = ParentRows(store, UNITS, chosen("text = 'old'"))
    assert [rows.is_kept(row) for row in range(4)] == [True, False, False, False]
    rows.merged(UNITS[0], 0, table(0, 10, "new"))

    pq.write_table(table(0, 10, "new"), store.path / UNITS[0].part_name)

    assert not rows.is_kept(1)
    rows.forget(UNITS[0])
    assert all(rows.is_kept(row) for row in range(10))
    assert rows.merged(UNITS[0], 0, table(0, 10, "x")).to_pylist() == (
        table(0, 10, "new").to_pylist()
    )


def test_a_part_that_cannot_be_read_is_named(store):
    part = store.path / UNITS[2].part_name
    part.write_bytes(part.read_bytes()[:-10])

    with pytest.raises(StorageError) as caught:
        parent_rows.count_chosen(store, UNITS, chosen("id = 0"))
    assert f"{part}: cannot read this part: " in str(caught.value)
    assert "`jaxpaged verify`" in str(caught.value)


@pytest.mark.parametrize("is_folder", [False, True], ids=["missing", "a folder"])
def test_a_part_that_is_not_there_is_named(store, is_folder):
    part = store.path / UNITS[2].part_name
    part.unlink()
    if is_folder:
        part.mkdir()
    rows = ParentRows(store, UNITS, chosen("id = 0"))

    with pytest.raises(StorageError, match=r"part-000002.parquet: "):
        rows.is_kept(20)
