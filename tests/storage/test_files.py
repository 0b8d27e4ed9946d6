import errno
import os
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from botocore.exceptions import EndpointConnectionError, NoCredentialsError
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from job_output import make_units

from jaxpaged.errors import InputSchemaError
from jaxpaged.job.input import input_files, input_plan, reader
from jaxpaged.job.input.input_plan import InputPlan
from jaxpaged.job.units import Unit
from jaxpaged.storage import access
from jaxpaged.storage.files import SourceFiles
from jaxpaged.storage.options import StorageOptions
from jaxpaged.storage.remote_calls import RemoteCalls
from jaxpaged.storage.remote_files import RemoteFiles

# Local files -------------------------------------------------------------------------------------


def test_a_local_stamp_tells_what_size_and_time_of_modification_do_not(tmp_path):
    files, path = SourceFiles(), tmp_path / "x"
    path.write_bytes(b"abc")
    first, times = files.stat(str(path)), path.stat()

    path.write_bytes(b"xyz")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    second = files.stat(str(path))
    (tmp_path / "y").write_bytes(b"xyz")
    os.utime(tmp_path / "y", ns=(times.st_atime_ns, times.st_mtime_ns))
    (tmp_path / "y").replace(path)
    third = files.stat(str(path))

    assert first.size == second.size == third.size == 3
    assert first.modified == second.modified == third.modified
    assert len({first.stamp, second.stamp, third.stamp}) == 3
    assert first.changed_ns == max(times.st_mtime_ns, times.st_ctime_ns)


def test_local_places_say_what_they_are(tmp_path):
    files = SourceFiles()
    (tmp_path / "x").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("x")

    assert files.stat(str(tmp_path)).kind == "folder"
    assert files.stat(str(tmp_path / "link")).kind == "file"
    assert files.stat("/dev/null").kind == "other"
    assert files.folder(str(tmp_path / "a" / "..")) == str(tmp_path)
    assert files.folder("/") == ""
    assert files.stat(files.folder("/")).kind == "folder"
    with pytest.raises(FileNotFoundError):
        files.stat(str(tmp_path / "missing"))


# A store of our own ------------------------------------------------------------------------------


class FaultyStore(DirFileSystem):
    """A folder as a store that fails as it is told: one error, or none, for each request."""

    cachable = False

    def __init__(self, folder: pathlib.Path) -> None:
        super().__init__(path=str(folder), fs=LocalFileSystem())
        self.faults: list[Exception | None] = []
        self.lasting: Exception | None = None
        self.facts: dict[str, object] = {}
        self.listed: dict[str, dict[str, object]] = {}
        self.num_bytes = 0
        self.num_reads = 0

    def fail(self) -> None:
        fault = self.faults.pop(0) if self.faults else self.lasting
        if fault is not None:
            raise fault

    def info(self, path, **options):
        self.fail()
        return super().info(path, **options) | self.facts

    def find(self, path, *arguments, **options):
        self.fail()
        found: Any = super().find(path, *arguments, **options)
        return found | self.listed

    def glob(self, path, **options):
        self.fail()
        return super().glob(path, **options)

    def open(self, path, mode="rb", **options):
        self.fail()
        return FaultyFile(self, pathlib.Path(str(self._join(path))))


class FaultyFile:
    """Fails when it is read, after it has moved on."""

    def __init__(self, store: FaultyStore, path: pathlib.Path) -> None:
        self._store = store
        self._file = path.open("rb")
        self.tell, self.seek, self.close = self._file.tell, self._file.seek, self._file.close

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self._store.fail()
        self._store.num_bytes += len(data)
        self._store.num_reads += 1
        return data


@pytest.fixture
def store(tmp_path) -> FaultyStore:
    """Has the bucket `b` with in/x.parquet."""
    folder = tmp_path / "b" / "in"
    folder.mkdir(parents=True)
    pq.write_table(pa.table({"q": [f"text {i}" for i in range(1000)]}), folder / "x.parquet")
    return FaultyStore(tmp_path)


class StoreFiles(SourceFiles):
    """The files of a store of our own."""

    def __init__(self, store: FaultyStore) -> None:
        super().__init__()
        self.pauses: list[float] = []
        self._remote = RemoteFiles(
            StorageOptions(),
            calls=RemoteCalls(sleep=self.pauses.append),
            connect=lambda url, options: (store, url),
        )


def rows_of(plan: InputPlan, *columns: str) -> Iterator[dict]:
    units = make_units(num_rows=plan.num_rows, rows_per_part=1000)
    for batch in reader.read(plan, columns or ("q",), units):
        yield from batch.cells.to_pylist()


def refused(error: Exception) -> str:
    assert isinstance(error, InputSchemaError)
    assert error.__cause__ is None
    assert error.__suppress_context__ or error.__context__ is None
    return str(error)


def test_a_store_that_stumbles_is_asked_again(store):
    files = StoreFiles(store)
    lost = [ConnectionResetError("lost"), None, OSError(errno.EIO, "We encountered an error"), None]

    store.faults = [*lost, TimeoutError("slow"), TimeoutError("slow"), None, *lost * 20]
    plan = input_plan.plan(["s3://b/in"], files=files)
    store.faults = [None, *lost * 20]
    rows = list(rows_of(plan))

    assert [file.name for file in plan.files] == ["x.parquet"]
    assert rows == [{"q": f"text {i}"} for i in range(1000)]
    assert len(files.pauses) > 10


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            EndpointConnectionError(endpoint_url="http://127.0.0.1:1/b"),
            r"Could not connect to the endpoint URL.*times",
        ),
        (NoCredentialsError(), r"Unable to locate credentials"),
        (PermissionError("Forbidden"), r"Forbidden; the credentials need"),
        (FileNotFoundError("The specified bucket does not exist"), r"there is no such bucket"),
        (ValueError("Invalid bucket name"), r"Invalid bucket name"),
        (TimeoutError("https://user:pw@host/b/x?X-Amz-Signature=abc"), r"https://host/b/x, "),
    ],
)
def test_a_store_that_cannot_be_read_is_one_line(store, fault, message):
    files = StoreFiles(store)
    plan = input_plan.plan(["s3://b/in/x.parquet"], files=files)
    store.lasting = fault

    for path in ("s3://b/in", "s3://b/in/x.parquet", "s3://b/in/*.parquet"):
        with pytest.raises(
            InputSchemaError, match=rf"^input.path: .* s3://b/in.*{message}"
        ) as info:
            input_plan.plan([path], files=files)
        text = refused(info.value)
        assert "\n" not in text
        assert "pw" not in text
        assert "abc" not in text
    with pytest.raises(InputSchemaError, match=message) as info:
        plan.check_unchanged(Unit(index=0, start=0, stop=1))
    refused(info.value)
    # The look at the file, its opening, a look again, and the reading itself.
    for num_answered in range(4):
        store.lasting, store.faults = fault, [None] * num_answered
        with pytest.raises(InputSchemaError, match=message):
            list(rows_of(plan))


def test_our_own_bugs_are_not_blamed_on_the_store(store):
    store.lasting = TypeError("a bug")

    with pytest.raises(TypeError, match="a bug"):
        input_plan.plan(["s3://b/in"], files=StoreFiles(store))


def test_bytes_without_an_etag_are_hashed(store, tmp_path):
    local = input_plan.plan([str(tmp_path / "b" / "in")], files=SourceFiles())
    remote = input_plan.plan(["s3://b/in"], files=StoreFiles(store), known=local.records)

    assert remote.records[0].content == local.records[0].content
    assert remote.records[0].stamp != local.records[0].stamp
    remote.check_unchanged(Unit(index=0, start=0, stop=1))
    table = pa.table({"q": [f"next {i}" for i in range(1000)]})
    pq.write_table(table, tmp_path / "b" / "in" / "x.parquet")
    with pytest.raises(InputSchemaError, match=r"s3://b/in/x.parquet: changed while the job was"):
        remote.check_unchanged(Unit(index=0, start=0, stop=1))


def test_labels_of_an_object_in_google_s_store_do_not_count(store):
    files, place = StoreFiles(store), "s3://b/in/x.parquet"
    store.facts = {"etag": "CIu=", "md5Hash": "kAFQmDzST7DWlj99KOF/cg==", "generation": "17"}
    store.facts |= {"updated": "2026-01-02T03:04:05.678Z"}
    first = files.stat(place)
    store.facts |= {"etag": "CJv="}
    labelled = files.stat(place)
    del store.facts["md5Hash"]  # as of a composed object
    composed = files.stat(place)

    assert labelled == first
    assert first.etag == "kAFQmDzST7DWlj99KOF/cg=="
    assert composed.etag == "17"
    assert first.changed_ns is None


def test_what_stands_for_a_folder_is_no_file(store):
    marks = ("b/in", "b/in/", "b/in/more/", "b/in/more.parquet/")
    store.listed = {name: {"type": "file", "size": 0} for name in marks}
    store.listed["b/in/part.parquet"] = {"type": "directory"}

    assert list(StoreFiles(store).walk("s3://b/in")) == ["s3://b/in/x.parquet"]


def test_columns_side_by_side_are_fetched_once_and_in_large_pieces(store, tmp_path):
    columns = {f"c{i}": [f"{i} {row:0200d}" for row in range(20_000)] for i in range(4)}
    path = tmp_path / "b" / "wide.parquet"
    pq.write_table(pa.table(columns), path, compression="none", use_dictionary=False)
    store.facts = {"ETag": '"abc"'}
    plan = input_plan.plan(["s3://b/wide.parquet"], files=StoreFiles(store))
    store.num_bytes = store.num_reads = 0

    num_rows = sum(1 for _ in rows_of(plan, *columns))

    size = path.stat().st_size
    assert plan.records[0].content == "etag:abc"
    assert num_rows == 20_000
    assert size > 15_000_000
    assert store.num_bytes < 1.1 * size
    assert store.num_reads < 40


# A server that speaks S3 -------------------------------------------------------------------------


class Bucket:
    """A bucket whose objects others change."""

    def __init__(self, url: str, options: StorageOptions) -> None:
        self.url = url
        self.system, self.path = access.filesystem(url, options)

    def put(self, name: str, data: bytes) -> str:
        """Writes an object; gives its URL."""
        self.system.pipe_file(f"{self.path}/{name}", data)
        return f"{self.url}/{name}"

    def put_rows(self, name: str, texts: Sequence[str]) -> str:
        sink = pa.BufferOutputStream()
        table = pa.table({"q": pa.array(texts, pa.string())})
        pq.write_table(table, sink, compression="none", row_group_size=1000)
        return self.put(name, sink.getvalue().to_pybytes())


@pytest.fixture
def bucket(s3_options, s3_bucket) -> Bucket:
    return Bucket(s3_bucket, s3_options)


@pytest.fixture
def files(s3_options) -> SourceFiles:
    return SourceFiles(s3_options)


def test_objects_and_prefixes_say_what_they_are(bucket, files):
    place = bucket.put("in/x.parquet", b"abc")
    bucket.put("marked/", b"")
    first = files.stat(place)
    bucket.put("in/x.parquet", b"xyz")
    second = files.stat(place)

    assert (first.kind, first.size, first.changed_ns) == ("file", 3, None)
    assert first.etag == "900150983cd24fb0d6963f7d28e17f72"
    assert first.modified.startswith("20")
    assert (second.etag, second.stamp) != (first.etag, first.stamp)
    assert [files.stat(f"{bucket.url}{name}").kind for name in ("", "/", "/in", "/in/")] == [
        "folder"
    ] * 4
    assert files.stat(f"{bucket.url}/marked").kind == "folder"
    with pytest.raises(FileNotFoundError):
        files.stat(f"{bucket.url}/i")
    with pytest.raises(InputSchemaError, match=r"input.path: .*s3://no-such-bucket/x: .*no such b"):
        files.stat("s3://no-such-bucket/x")


def test_folders_and_globs_in_a_bucket_mean_what_they_mean_on_disk(bucket, files):
    names = ("b.parquet", "a.PARQUET", "deep/c.pq", "deep/er/d ä+%20.parq", "README.md")
    for name in (*names, "_SUCCESS", "_x/y.parquet", ".z.parquet", "deep/"):
        bucket.put(f"in/{name}", b"")
    bucket.put("in2/other.parquet", b"")

    def found(*paths: str) -> list[str]:
        return list(input_files.find([f"{bucket.url}/{path}" for path in paths], files))

    everything = ["a.PARQUET", "b.parquet", "deep/c.pq", "deep/er/d ä+%20.parq"]
    assert found("in") == everything
    assert found("in/") == everything
    assert found("") == [f"in/{name}" for name in everything] + ["in2/other.parquet"]
    assert found("in/b.parquet") == ["b.parquet"]
    assert found("in/*.parquet") == ["b.parquet"]
    assert found("in/**/*.p*q*") == ["b.parquet", "deep/c.pq", "deep/er/d ä+%20.parq"]
    assert found("in*/*.parquet") == ["in/b.parquet", "in2/other.parquet"]
    assert found("in/deep", "in2/other.parquet") == [
        "in/deep/c.pq",
        "in/deep/er/d ä+%20.parq",
        "in2/other.parquet",
    ]
    for path, message in (("in/nothing", "does not exist"), ("in/*.csv", "no file matches")):
        with pytest.raises(InputSchemaError, match=message):
            found(path)


def test_names_are_those_of_the_same_files_on_disk(bucket, files, tmp_path):
    for name in ("x/a.parquet", "x/y/b.parquet"):
        bucket.put_rows(f"deep/in/{name}", ["a"])
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"q": ["a"]}), tmp_path / name)

    remote = input_plan.plan([f"{bucket.url}/deep/in"], files=files)
    local = input_plan.plan([str(tmp_path)], files=SourceFiles())

    assert [file.name for file in remote.files] == [file.name for file in local.files]
    assert {file.name: file.num_rows for file in remote.files} == {
        "x/a.parquet": 1,
        "x/y/b.parquet": 1,
    }


def test_a_plan_in_a_bucket_reads_the_rows_and_knows_the_files_again(bucket, files):
    bucket.put_rows("in/b.parquet", [f"b{i}" for i in range(2500)])
    bucket.put_rows("in/empty.parquet", [])
    plan = input_plan.plan([f"{bucket.url}/in"], files=files)

    bucket.put_rows("in/a.parquet", ["a"])
    again = input_plan.plan([f"{bucket.url}/in"], files=files, known=plan.records)

    assert all(record.content.startswith("etag:") for record in plan.records)
    assert again.records[:2] == plan.records
    assert [row["q"] for row in rows_of(again)] == [*(f"b{i}" for i in range(2500)), "a"]
    again.check_unchanged(Unit(index=0, start=0, stop=again.num_rows))


def test_a_multipart_object_has_an_etag_too(bucket, files):
    bucket.put_rows("in/x.parquet", ["a"])
    path = f"{bucket.path}/in/x.parquet"
    data = bucket.system.cat_file(path)
    with bucket.system.open(path, "wb", block_size=5 * 2**20) as file:
        file.write(data[:4] + bytes(6 * 2**20) + data[4:])

    [record] = input_plan.plan([f"{bucket.url}/in"], files=files).records

    assert re.fullmatch(r"etag:[0-9a-f]{32}-\d", record.content)


@pytest.mark.parametrize("change", ["other text", "gone"])
def test_an_object_that_changes_gets_into_no_part(bucket, files, change):
    place = bucket.put_rows("in/x.parquet", [f"a{i:06d}" * 20 for i in range(30_000)])
    plan = input_plan.plan([place], files=files)
    unit = Unit(index=0, start=0, stop=1)
    rows = rows_of(plan)
    next(rows)
    plan.check_unchanged(unit)

    if change == "gone":
        bucket.system.rm_file(f"{bucket.path}/in/x.parquet")
        message = r"x.parquet: cannot read it any more: it does not exist"
    else:
        bucket.put_rows("in/x.parquet", [f"b{i:06d}" * 20 for i in range(30_000)])
        message = r"x.parquet: changed while the job was running"

    for look in (lambda: list(rows), lambda: list(rows_of(plan))):
        with pytest.raises(InputSchemaError, match=message):
            look()
    with pytest.raises(InputSchemaError, match=message):
        plan.check_unchanged(unit)


def test_a_store_that_cannot_be_reached_is_named():
    options = StorageOptions.model_validate(
        {"s3": {"endpoint_url": "http://127.0.0.1:1", "anonymous": True}}
    )
    files = SourceFiles(options)

    with pytest.raises(InputSchemaError, match=r"s3://bucket/x: Could not connect.*:1/bucket/x"):
        input_plan.plan(["s3://bucket/x"], files=files)


def test_an_object_that_is_no_parquet_file_is_named(bucket, files):
    for data in (b"", b"question,answer\n1,2\n"):
        place = bucket.put("in/x.parquet", data)
        with pytest.raises(InputSchemaError, match=r"s3://.*/in/x.parquet: not a Parquet file"):
            input_plan.plan([place], files=files)
