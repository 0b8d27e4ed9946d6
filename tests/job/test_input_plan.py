import collections
import dataclasses
import hashlib
import io
import json
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from open_folders import reachable

from jaxpaged.errors import InputSchemaError
from jaxpaged.job.input import file_content, file_record, input_plan
from jaxpaged.job.input.file_content import TICK_NS
from jaxpaged.job.input.file_record import FileRecord
from jaxpaged.job.input.input_plan import InputPlan
from jaxpaged.storage.files import OpenFile, SourceFiles


class CountingFiles(SourceFiles):
    """Counts the bytes that are read of each place."""

    def __init__(self) -> None:
        super().__init__()
        self.num_read: collections.Counter[str] = collections.Counter()

    def open(self, place: str) -> io.BufferedReader:
        return io.BufferedReader(_CountedFile(place, self.num_read))


class _CountedFile(io.FileIO):
    def __init__(self, place: str, num_read: collections.Counter[str]) -> None:
        super().__init__(place, "rb")
        self._counter, self._place = num_read, place

    def readinto(self, buffer) -> int:
        num_bytes = super().readinto(buffer)
        self._counter[self._place] += num_bytes
        return num_bytes


class ChangingFiles(SourceFiles):
    """Something happens to a file while it is read."""

    def __init__(self, change) -> None:
        super().__init__()
        self._change = change

    def open(self, place: str) -> OpenFile:
        file = super().open(place)
        self._change(pathlib.Path(place))
        return file


def plan_of(*paths, files=None, known=()) -> InputPlan:
    files = files or SourceFiles()
    return input_plan.plan([str(path) for path in paths], files=files, known=known)


def record_of(path, **options) -> FileRecord:
    [record] = plan_of(path, **options).records
    return record


def aged(record: FileRecord, path: pathlib.Path, nanoseconds: int = TICK_NS) -> FileRecord:
    """The record as if its file had been this old when it was hashed."""
    changed = path.stat().st_ctime_ns
    return dataclasses.replace(
        record, hashed_at=max(changed, path.stat().st_mtime_ns) + nanoseconds
    )


def write_plain(path: pathlib.Path, letter: str, num_rows: int = 100_000) -> None:
    """A file whose size and footer do not depend on its text."""
    path.parent.mkdir(exist_ok=True)
    table = pa.table({"q": [f"{letter}{i:09d}" for i in range(num_rows)]})
    pq.write_table(table, path, compression="none", use_dictionary=False, write_statistics=False)


@pytest.fixture
def path(tmp_path) -> pathlib.Path:
    """A file of 1.4 MB."""
    write_plain(tmp_path / "in" / "x.parquet", "a")
    return tmp_path / "in" / "x.parquet"


def test_the_plan_counts_rows_over_files_and_row_groups(write_rows):
    write_rows("b.parquet", q=["b0", "b1"], row_group_size=1)
    write_rows("deep/c.pq", q=["c0"])
    plan = plan_of(write_rows("a.parquet", q=["a0"]).parent)

    assert plan.num_rows == 4
    assert [(g.file.name, g.index, g.start, g.num_rows) for g in plan.row_groups()] == [
        ("a.parquet", 0, 0, 1),
        ("b.parquet", 0, 1, 1),
        ("b.parquet", 1, 2, 1),
        ("deep/c.pq", 0, 3, 1),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"x.parquet: not a Parquet file, or one that was cut off \(0 bytes"),
        (b"question,answer\n1,2\n", r"x.parquet: not a Parquet file"),
        (b"PAR1" + b"\x00" * 20 + b"\xff\xff\xff\x7fPAR1", r"not a Parquet file, or one"),
        (b"PAR1" + b"\x00" * 20 + b"\x08\x00\x00\x00PAR1", r"cannot read it as Parquet"),
        (b"PAR1" + b"\x00" * 20 + b"\x08\x00\x00\x00PARE", r"encrypted Parquet files are not"),
    ],
)
def test_a_broken_file_is_named(tmp_path, content, message):
    path = tmp_path / "x.parquet"
    path.write_bytes(content)

    with pytest.raises(InputSchemaError, match=message):
        plan_of(path)


def test_a_file_cut_off_anywhere_is_refused(write_rows):
    path = write_rows(q=["a"] * 100)
    data = path.read_bytes()

    for length in (1, 4, 12, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(InputSchemaError, match=r"rows.parquet"):
            plan_of(path)


def test_no_permission_is_one_message(write_rows):
    folder = write_rows("a.parquet", q=["a"]).parent
    write_rows("deep/c.pq", q=["c"])
    # As nobody, because root may read everything.
    script = (
        "import os, sys\n"
        "from jaxpaged.job.input import input_plan\n"
        "from jaxpaged.storage.files import OpenFile, SourceFiles\n"
        "if os.geteuid() == 0: os.setuid(65534)\n"
        "try: input_plan.plan(sys.argv[1:], files=SourceFiles())\n"
        "except Exception as error: sys.stdout.write(f'{type(error).__name__}: {error}')\n"
    )
    reachable(folder)
    (folder / "a.parquet").chmod(0o000)
    (folder / "deep").chmod(0o000)

    def message(path: pathlib.Path) -> str:
        command = [sys.executable, "-c", script, str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert message(folder / "a.parquet").startswith("InputSchemaError")
    assert message(folder / "a.parquet").endswith(
        "a.parquet: cannot read it as Parquet: Permission denied"
    )
    assert message(folder / "deep").endswith("deep: Permission denied")
    (folder / "deep").chmod(0o755)


def test_a_column_name_that_occurs_twice_is_refused(tmp_path):
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
    pq.write_table(table, tmp_path / "x.parquet")

    with pytest.raises(InputSchemaError, match=r"2 columns are named 'prompt'"):
        plan_of(tmp_path / "x.parquet")


def test_what_is_no_regular_file_is_refused_before_it_is_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe.parquet")

    with pytest.raises(InputSchemaError, match=r"pipe.parquet: not a regular file"):
        plan_of(tmp_path / "pipe.parquet")


def test_the_first_of_many_broken_files_is_named(write_rows):
    for i in range(40):
        write_rows(f"{i:02d}.parquet", q=["a"])
    folder = write_rows("40.parquet", q=["a"]).parent
    for i in (39, 17, 23):
        (folder / f"{i:02d}.parquet").write_bytes(b"broken")

    with pytest.raises(InputSchemaError, match=r"17.parquet: not a Parquet file"):
        plan_of(folder)


def test_rows_and_row_groups_may_be_none(write_rows):
    folder = write_rows("a.parquet", q=pa.array([], pa.string())).parent
    pq.ParquetWriter(folder / "b.parquet", pa.schema([("q", pa.string())])).close()
    write_rows("c.parquet", q=["x"] * 7, row_group_size=3)

    plan = plan_of(folder)

    assert [record.num_rows for record in plan.records] == [0, 0, 7]
    assert [record.row_groups for record in plan.records][1:] == [(), ((3, 2), (1, 1))]
    assert [(g.index, g.start, g.num_rows) for g in plan.row_groups()][-3:] == [
        (0, 0, 3),
        (1, 3, 3),
        (2, 6, 1),
    ]


def test_other_bytes_of_the_same_size_time_and_footer_are_seen(path):
    before, times = record_of(path), path.stat()
    write_plain(path, "b")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    after = record_of(path, known=[aged(before, path)])

    same = ("name", "bytes", "modified", "footer", "row_groups")
    assert all(getattr(before, key) == getattr(after, key) for key in same)
    assert after.content != before.content
    assert after.stamp != before.stamp


def test_other_bytes_written_within_a_tick_of_the_clock_are_seen(path):
    before = record_of(path)
    write_plain(path, "b")
    # As if both writes had had the same time.
    forged = dataclasses.replace(before, stamp=record_of(path).stamp)

    assert record_of(path, known=[aged(forged, path, TICK_NS - 1)]).content != before.content
    # The same stamp, and the first content taken long after both: this cannot be.
    assert record_of(path, known=[aged(forged, path)]).content == before.content


@pytest.mark.parametrize("day", [-1, 1], ids=["yesterday", "tomorrow"])
def test_a_time_that_was_set_is_not_trusted(path, day):
    moment = time.time_ns() + day * 24 * 3600 * 10**9
    os.utime(path, ns=(moment, moment))
    before = record_of(path)
    times = path.stat()
    write_plain(path, "b")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    forged = dataclasses.replace(before, stamp=record_of(path).stamp)

    assert record_of(path, known=[forged]).content != before.content


def test_an_unchanged_file_is_not_read_again(path):
    files, size = CountingFiles(), path.stat().st_size
    first = record_of(path, files=files)
    assert files.num_read[str(path)] >= size

    files.num_read.clear()
    young = record_of(path, files=files, known=[first])
    assert young.content == first.content
    assert files.num_read[str(path)] >= size

    files.num_read.clear()
    old = aged(first, path)
    assert record_of(path, files=files, known=[old]) == old
    assert 0 < files.num_read[str(path)] < size / 4


@pytest.mark.parametrize("change", ["touch", "copy", "link"])
def test_a_touched_or_copied_file_is_the_same_after_another_look(path, change):
    before = aged(record_of(path), path)
    if change == "touch":
        path.touch()
    elif change == "link":
        (path.parent / "other").hardlink_to(path)
    else:
        shutil.copy(path, path.parent / "other")
        (path.parent / "other").replace(path)
    files = CountingFiles()

    after = record_of(path, files=files, known=[before])

    assert after.stamp != before.stamp
    assert after.content == before.content
    assert files.num_read[str(path)] >= path.stat().st_size


def test_a_large_file_that_was_just_written_is_hashed_when_its_time_is_past(path):
    with path.open("r+b") as file:
        data = file.read()
        length = int.from_bytes(data[-8:-4], "little") + 8
        file.seek(65 * 1024 * 1024)  # a hole in front of the footer
        file.write(data[-length:])

    record = record_of(path)

    assert record.hashed_at - path.stat().st_ctime_ns >= TICK_NS
    assert record_of(path, known=[record]) == record


def test_known_files_come_first_and_in_their_order(write_rows):
    folder = write_rows("b.parquet", q=["b"]).parent
    write_rows("d.parquet", q=["d", "e"])
    known = plan_of(folder / "d.parquet", folder / "b.parquet").records
    write_rows("a.parquet", q=["a"])
    write_rows("c.parquet", other=["c"])

    plan = plan_of(folder, known=known)
    (folder / "d.parquet").unlink()
    shrunk = plan_of(folder, known=known)

    names = [file.name for file in plan.files]
    assert names == ["d.parquet", "b.parquet", "a.parquet", "c.parquet"]
    assert plan.schema.names == ["q"]
    assert plan.schemas[1][1] == "c.parquet"
    assert [record.content for record in plan.records[:2]] == [file.content for file in known]
    assert [file.name for file in shrunk.files] == ["b.parquet", "a.parquet", "c.parquet"]


def test_a_file_that_is_being_written_is_refused(path):
    def change_text(path: pathlib.Path) -> None:
        write_plain(path, "b")

    with pytest.raises(InputSchemaError, match=r"x.parquet: changed while it was read; run again"):
        plan_of(path, files=ChangingFiles(change_text))
    write_plain(path, "a")
    with pytest.raises(InputSchemaError, match=r"x.parquet: cannot read it as Parquet: No such fi"):
        plan_of(path, files=ChangingFiles(pathlib.Path.unlink))


def test_nobody_waits_for_a_hash_that_is_not_wanted(path):
    files, stop = SourceFiles(), threading.Event()
    stop.set()

    with files.open(str(path)) as file, pytest.raises(file_content.Stopped):
        file_content.take(file, files.stat(str(path)), None, stop=stop)
    with files.open(str(path)) as file:
        assert file.tell() == 0


def test_a_record_survives_json(write_rows):
    path = write_rows("ä.parquet", q=["a"] * 7, row_group_size=3)
    record = record_of(path)

    values = json.loads(json.dumps(record.to_json()))

    assert file_record.from_json(values) == record
    assert values["row_groups"] == [[3, 2], [1, 1]]
    assert values["content"] == "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("name", ""),
        ("name", None),
        ("bytes", -1),
        ("bytes", "12"),
        ("bytes", True),
        ("content", "md5:abc"),
        ("content", "sha256:" + "0" * 63),
        ("content", "etag:"),
        ("footer", "0" * 63 + "G"),
        ("row_groups", [[1]]),
        ("row_groups", [[1, 0]]),
        ("row_groups", [[-1, 1]]),
        ("row_groups", [[1.5, 1]]),
        ("row_groups", {"1": 2}),
        ("stamp", 5),
        ("hashed_at", "now"),
    ],
)
def test_a_record_that_was_tampered_with_is_refused(write_rows, key, value):
    values = record_of(write_rows(q=["a"])).to_json()

    with pytest.raises(ValueError, match=rf"^{key}"):
        file_record.from_json(values | {key: value})
    del values[key]
    with pytest.raises(ValueError, match=rf"^{key}: Field required"):
        file_record.from_json(values)


@pytest.mark.parametrize("values", [None, [], "x", 5])
def test_what_is_no_record_at_all_is_refused(values):
    with pytest.raises(ValueError, match=r"^the record of a file: "):
        file_record.from_json(values)


def test_a_huge_number_of_row_groups_in_a_record_costs_nothing(write_rows):
    values = record_of(write_rows(q=["a"])).to_json()

    record = file_record.from_json(values | {"row_groups": [[10, 10**12]]})

    assert record.num_rows == 10**13


def test_a_local_input_loads_nothing_for_object_stores(write_rows):
    script = (
        "import sys\n"
        "from jaxpaged.job.input import input_plan, reader\n"
        "from jaxpaged.storage.files import OpenFile, SourceFiles\n"
        "input_plan.plan(sys.argv[1:], files=SourceFiles())\n"
        "sys.stdout.write(' '.join({'fsspec', 's3fs', 'jax'} & set(sys.modules)))\n"
    )
    command = [sys.executable, "-c", script, str(write_rows(q=["a"]))]

    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == ""
