import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxpaged.errors import InputSchemaError
from jaxpaged.job import input_plan, reader
from jaxpaged.job.units import Unit, Units


def batches(path, columns=None, units=None):
    plan = input_plan.plan([str(path)])
    units = units or Units(num_rows=plan.num_rows, rows_per_part=10**6)
    return list(reader.read(plan, columns or plan.schema.names, units))


def values(found, name):
    return [value for batch in found for value in batch.cells.column(name).to_pylist()]


def write_invalid(path, kind=None):
    """Three rows of text of which the second is not UTF-8; returns the column."""
    raw = pa.array([b"fine", b"\xff\xfe" * 20, b"good"])
    text = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    if kind == "list<struct>":
        roles = pa.array(["user"] * 3)
        chats = pa.StructArray.from_arrays([roles, text], names=["role", "content"])
        text = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), chats)
    elif kind is not None:
        text = text.cast(kind)
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table({"id": [0, 1, 2], "q": text}), path)


@pytest.mark.parametrize(
    "kind",
    [
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.dictionary(pa.int32(), pa.string()),
    ],
)
def test_all_kinds_of_text_read_alike(write_rows, kind):
    texts = ["a", None, "", "ä" * 50, "a"]
    path = write_rows(q=pa.array(texts).cast(kind) if not pa.types.is_dictionary(kind)
                      else pa.array(texts).dictionary_encode())  # fmt: skip

    found = batches(path)

    assert values(found, "q") == texts
    assert not pa.types.is_dictionary(found[0].cells.schema.field("q").type)


def test_nested_columns_and_nulls_keep_their_values(write_rows):
    chats = [[{"role": "user", "content": "a"}], None, [], [None]]
    path = write_rows(chat=chats, ids=[[1], [], None, [None]])

    found = batches(path)

    assert values(found, "chat") == chats
    assert values(found, "ids") == [[1], [], None, [None]]


def test_only_the_asked_columns_are_read(write_rows):
    path = write_rows(**{"a": [1], "b": ["x"], "b.c": ["y"]})

    assert batches(path, ["b.c"])[0].cells.schema.names == ["b.c"]
    assert batches(path, ["b", "a"])[0].cells.schema.names == ["b", "a"]


def test_rows_without_any_needed_column_are_still_rows(write_rows):
    path = write_rows(a=list(range(300)))
    plan = input_plan.plan([str(path)])

    found = list(reader.read(plan, [], Units(num_rows=300, rows_per_part=1000)))

    assert sum(len(batch) for batch in found) == 300


def test_batches_stay_within_units_and_row_groups(write_rows):
    write_rows("a.parquet", id=list(range(7)), row_group_size=3)
    path = write_rows("b.parquet", id=list(range(7, 10)))

    found = batches(path.parent, units=Units(num_rows=10, rows_per_part=4))

    assert [(b.unit.index, b.start, b.file, b.row_group, b.first_index, len(b)) for b in found] == [
        (0, 0, "a.parquet", 0, 0, 3),
        (0, 3, "a.parquet", 1, 0, 1),
        (1, 4, "a.parquet", 1, 1, 2),
        (1, 6, "a.parquet", 2, 0, 1),
        (1, 7, "b.parquet", 0, 0, 1),
        (2, 8, "b.parquet", 0, 1, 2),
    ]
    assert values(found, "id") == list(range(10))


def test_only_wanted_units_are_read(write_rows):
    path = write_rows(id=list(range(1000)), row_group_size=300)

    found = batches(
        path, units=[Unit(index=1, start=10, stop=20), Unit(index=7, start=590, stop=605)]
    )

    assert values(found, "id") == [*range(10, 20), *range(590, 605)]
    assert {batch.row_group for batch in found} == {0, 1, 2}


def test_no_rows_and_no_row_groups_are_fine(write_rows, tmp_path):
    path = write_rows("a.parquet", q=pa.array([], pa.string()))
    pq.ParquetWriter(path.parent / "b.parquet", pa.schema([("q", pa.string())])).close()
    write_rows("c.parquet", q=["x"])

    assert values(batches(path.parent), "q") == ["x"]
    assert batches(path) == []


@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.large_string(), pa.string_view(), "dictionary", "list<struct>", "list<view>"],
    ids=str,
)
def test_text_that_is_not_utf_8_spoils_its_row_only(tmp_path, kind):
    path = tmp_path / "in" / "x.parquet"
    if kind == "dictionary":
        write_invalid(path)
        table = pq.read_table(path, read_dictionary=["q"])
        pq.write_table(table, path)
    elif kind in (pa.string_view(), "list<view>"):
        write_invalid(path)
        raw = pq.read_table(path).column("q").cast(pa.binary()).combine_chunks()
        view = raw.cast(pa.binary_view()).view(pa.string_view())
        cells = pa.ListArray.from_arrays([0, 1, 2, 3], view) if kind == "list<view>" else view
        pq.write_table(pa.table({"id": [0, 1, 2], "q": cells}), path)
    else:
        write_invalid(path, None if kind == pa.string() else kind)

    [batch] = batches(path)

    assert batch.invalid == {1: "q"}
    assert batch.cells.column("id").to_pylist() == [0, 1, 2]
    cells = batch.cells.column("q").to_pylist()
    assert cells[1] is None
    assert "fine" in str(cells[0])
    assert "good" in str(cells[2])
    batch.cells.validate(full=True)


def test_a_small_file_that_holds_much_text_is_read_in_small_batches(tmp_path):
    path = tmp_path / "bomb.parquet"
    words = pa.DictionaryArray.from_arrays(
        pa.array([0] * 20_000, pa.int32()), pa.array(["x" * 1_000_000])
    )
    pq.write_table(pa.table({"q": words}), path)
    plan = input_plan.plan([str(path)])
    before = pa.total_allocated_bytes()

    found = reader.read(plan, ["q"], Units(num_rows=20_000, rows_per_part=10**6))
    sizes = []
    peak = 0
    for batch, _ in zip(found, range(20), strict=False):
        sizes.append(batch.cells.nbytes)
        peak = max(peak, pa.total_allocated_bytes() - before)
    found.close()

    assert path.stat().st_size < 200_000  # of 20 GB of text
    assert max(sizes) <= reader.MAX_BATCH_BYTES
    assert peak < 6 * reader.MAX_BATCH_BYTES


def test_a_huge_row_group_is_read_in_bounded_memory(tmp_path):
    path = tmp_path / "huge.parquet"
    texts = [f"{i:08d}" * 256 for i in range(40_000)]
    pq.write_table(pa.table({"q": texts}), path, row_group_size=40_000)
    plan = input_plan.plan([str(path)])
    del texts
    before = pa.total_allocated_bytes()

    num_rows, peak = 0, 0
    for batch in reader.read(plan, ["q"], Units(num_rows=40_000, rows_per_part=10**6)):
        num_rows += len(batch)
        peak = max(peak, pa.total_allocated_bytes() - before)

    assert num_rows == 40_000
    assert peak < 16 * 1024 * 1024  # of 80 MB


@pytest.mark.slow
def test_chats_beyond_two_gigabytes_in_one_row_group_stream(tmp_path):
    path = tmp_path / "chats.parquet"
    chunk = pa.array([[{"role": "user", "content": f"{i:04d}" * 15_000}] for i in range(3000)])
    size = 13 * chunk.nbytes
    pq.write_table(pa.table({"chat": pa.chunked_array([chunk] * 13)}), path, row_group_size=39_000)
    del chunk
    plan = input_plan.plan([str(path)])
    before = pa.total_allocated_bytes()

    num_rows, peak = 0, 0
    for batch in reader.read(plan, ["chat"], Units(num_rows=39_000, rows_per_part=10**6)):
        num_rows += len(batch)
        peak = max(peak, pa.total_allocated_bytes() - before)

    assert size > 2**31
    assert len(list(plan.row_groups())) == 1
    assert num_rows == 39_000
    assert peak < 200 * 1024 * 1024  # a single page of this file has 60 MB


def test_lists_count_by_their_values(tmp_path):
    path = tmp_path / "lists.parquet"
    pq.write_table(pa.table({"ids": pa.array([[7] * 100_000] * 300, pa.list_(pa.int32()))}), path)

    found = batches(path)

    assert path.stat().st_size < 100_000  # of 120 MB
    assert max(batch.cells.nbytes for batch in found) <= 1.1 * reader.MAX_BATCH_BYTES
    assert sum(len(batch) for batch in found) == 300


def test_a_file_that_breaks_off_inside_names_file_and_row_group(write_rows):
    path = write_rows(q=[f"text {i}" for i in range(3000)], row_group_size=1000)
    start = pq.read_metadata(path).row_group(1).column(0).data_page_offset
    plan = input_plan.plan([str(path)])
    stamp = path.stat()
    data = bytearray(path.read_bytes())
    data[start : start + 200] = b"\xff" * 200
    path.write_bytes(data)
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))

    with pytest.raises(InputSchemaError, match=r"rows.parquet: row group 1 is broken near its row"):
        list(reader.read(plan, ["q"], Units(num_rows=3000, rows_per_part=10**6)))


def test_a_file_that_changed_since_the_plan_is_refused(write_rows):
    path = write_rows(q=["a"])
    plan = input_plan.plan([str(path)])
    write_rows(q=["other"])

    with pytest.raises(InputSchemaError, match=r"rows.parquet: changed while the job was running"):
        list(reader.read(plan, ["q"], Units(num_rows=1, rows_per_part=10)))

    path.unlink()
    with pytest.raises(InputSchemaError, match=r"rows.parquet: cannot read it any more"):
        list(reader.read(plan, ["q"], Units(num_rows=1, rows_per_part=10)))
