import dataclasses
import os
import pathlib
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from job_output import make_units

from jaxpaged.errors import InputSchemaError
from jaxpaged.job.input import file_content, input_plan, reader
from jaxpaged.job.input.input_plan import PlannedFile
from jaxpaged.job.units import Unit
from jaxpaged.storage.files import SourceFiles


def batches(path, columns=None, units=None):
    plan = input_plan.plan([str(path)], files=SourceFiles())
    units = units or make_units(num_rows=plan.num_rows, rows_per_part=10**6)
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
    plan = input_plan.plan([str(path)], files=SourceFiles())

    found = list(reader.read(plan, [], make_units(num_rows=300, rows_per_part=1000)))

    assert sum(len(batch) for batch in found) == 300


def test_batches_stay_within_units_and_row_groups(write_rows):
    write_rows("a.parquet", id=list(range(7)), row_group_size=3)
    path = write_rows("b.parquet", id=list(range(7, 10)))

    found = batches(path.parent, units=make_units(num_rows=10, rows_per_part=4))

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
    plan = input_plan.plan([str(path)], files=SourceFiles())
    before = pa.total_allocated_bytes()

    found = reader.read(plan, ["q"], make_units(num_rows=20_000, rows_per_part=10**6))
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
    plan = input_plan.plan([str(path)], files=SourceFiles())
    del texts
    before = pa.total_allocated_bytes()

    num_rows, peak = 0, 0
    for batch in reader.read(plan, ["q"], make_units(num_rows=40_000, rows_per_part=10**6)):
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
    plan = input_plan.plan([str(path)], files=SourceFiles())
    before = pa.total_allocated_bytes()

    num_rows, peak = 0, 0
    for batch in reader.read(plan, ["chat"], make_units(num_rows=39_000, rows_per_part=10**6)):
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


def test_a_file_that_is_broken_inside_names_file_and_row_group(write_rows):
    path = write_rows(q=[f"text {i}" for i in range(3000)], row_group_size=1000)
    start = pq.read_metadata(path).row_group(1).column(0).data_page_offset
    data = bytearray(path.read_bytes())
    data[start : start + 200] = b"\xff" * 200
    path.write_bytes(data)

    with pytest.raises(InputSchemaError, match=r"rows.parquet: row group 1 is broken near its row"):
        batches(path, ["q"])


CHANGED = r"x.parquet: changed while the job was running; if it holds what it held, run"


def write_plain(path, letter, num_rows=9000):
    """A file whose size and footer do not depend on its text."""
    path.parent.mkdir(exist_ok=True)
    table = pa.table({"q": [f"{letter}{i:099d}" for i in range(num_rows)]})
    options = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    pq.write_table(table, path, row_group_size=3000, **options)


@pytest.fixture
def path(tmp_path):
    """A file of three row groups, 900 kB."""
    write_plain(tmp_path / "in" / "x.parquet", "a")
    return tmp_path / "in" / "x.parquet"


def read(plan):
    return reader.read(plan, ["q"], make_units(num_rows=plan.num_rows, rows_per_part=1000))


def change_text(path):
    times = path.stat()
    write_plain(path, "b")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def shorten(path):
    os.truncate(path, path.stat().st_size // 2)


def swap(path):
    write_plain(path.parent / "other", "b")
    (path.parent / "other").replace(path)


@pytest.mark.parametrize("change", [change_text, shorten, swap])
def test_a_file_that_changed_since_the_plan_is_refused(path, change):
    plan = input_plan.plan([str(path)], files=SourceFiles())
    change(path)

    with pytest.raises(InputSchemaError, match=CHANGED):
        next(read(plan))
    with pytest.raises(InputSchemaError, match=CHANGED):
        plan.check_unchanged(Unit(index=0, start=0, stop=1))


def test_a_file_that_is_gone_since_the_plan_is_named(path):
    plan = input_plan.plan([str(path)], files=SourceFiles())
    path.unlink()

    gone = r"x.parquet: cannot read it any more: No such file or directory"
    with pytest.raises(InputSchemaError, match=gone):
        next(read(plan))
    with pytest.raises(InputSchemaError, match=gone):
        plan.check_unchanged(Unit(index=0, start=0, stop=1))


@pytest.mark.parametrize("change", [change_text, shorten, swap, type(pathlib.Path()).unlink])
def test_a_file_that_changes_while_it_is_read_gets_into_no_part(path, change):
    plan = input_plan.plan([str(path)], files=SourceFiles())
    found = read(plan)
    first = next(found)
    plan.check_unchanged(first.unit)

    change(path)

    with pytest.raises(
        InputSchemaError, match=r"x.parquet: (changed while|cannot read it any more)"
    ):
        plan.check_unchanged(first.unit)
    found.close()


def test_a_file_that_is_cut_off_while_it_is_read_is_not_called_broken(path):
    plan = input_plan.plan([str(path)], files=SourceFiles())
    found = read(plan)
    next(found)
    shorten(path)

    with pytest.raises(InputSchemaError, match=CHANGED):
        list(found)


def test_a_change_within_a_tick_of_the_clock_is_seen_while_the_job_runs(path):
    plan = input_plan.plan([str(path)], files=SourceFiles())
    change_text(path)
    # As if both writes had had the same time.
    stamp = SourceFiles().stat(str(path)).stamp
    record = dataclasses.replace(plan.files[0].record, stamp=stamp)
    plan = dataclasses.replace(plan, files=(PlannedFile(place=str(path), record=record),))

    with pytest.raises(InputSchemaError, match=CHANGED):
        plan.check_unchanged(Unit(index=0, start=0, stop=1))


class CountingFiles(SourceFiles):
    """Counts how often a file is opened."""

    num_opened = 0

    def open(self, place):
        self.num_opened += 1
        return super().open(place)


def put_back(path):
    data, times = path.read_bytes(), path.stat()
    write_plain(path, "b")
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize("change", [put_back, type(pathlib.Path()).touch])
def test_a_file_that_may_have_been_another_one_for_a_while_is_refused(path, change):
    plan = input_plan.plan([str(path)], files=SourceFiles())
    change(path)

    with pytest.raises(InputSchemaError, match=CHANGED):
        plan.check_unchanged(Unit(index=0, start=0, stop=1))

    again = input_plan.plan([str(path)], files=SourceFiles(), known=plan.records)
    assert again.records[0].content == plan.records[0].content


@pytest.mark.parametrize("seconds", [0, 3600])
def test_a_young_file_is_read_once_more_to_be_certain(path, seconds):
    moment = path.stat().st_mtime + seconds
    os.utime(path, (moment, moment))
    files = CountingFiles()
    plan = input_plan.plan([str(path)], files=files)
    unit = Unit(index=0, start=0, stop=1)

    before = files.num_opened
    plan.check_unchanged(unit)
    assert files.num_opened == before + 1
    time.sleep(file_content.TICK_NS / 1e9)
    for _ in range(3):
        plan.check_unchanged(unit)
    assert files.num_opened == before + 2

    change_text(path)
    with pytest.raises(InputSchemaError, match=CHANGED):
        plan.check_unchanged(unit)


def test_only_the_files_of_a_unit_are_looked_at(write_rows):
    write_rows("a.parquet", q=["a"] * 4)
    empty = write_rows("b.parquet", q=pa.array([], pa.string()))
    write_rows("c.parquet", q=["c"] * 4)
    plan = input_plan.plan([str(empty.parent)], files=SourceFiles())
    empty.unlink()
    (empty.parent / "c.parquet").unlink()

    plan.check_unchanged(Unit(index=0, start=0, stop=4))
    plan.check_unchanged(Unit(index=0, start=4, stop=4))
    for start, stop in ((3, 5), (4, 8), (0, 8)):
        with pytest.raises(InputSchemaError, match=r"c.parquet: cannot read it any more"):
            plan.check_unchanged(Unit(index=0, start=start, stop=stop))
