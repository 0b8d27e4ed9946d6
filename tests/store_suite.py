"""What every kind of store does alike: the meaning of its methods, as tests.

A test module inherits `StoreSuite` and has a fixture `connect`, which gives a new `Store` on the
same place each time it is called, as another process would have one.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxpaged.errors import StorageError
from jaxpaged.storage.store import Store

Connect = Callable[[], Store]

ODD_NAME = "a b/ü=1%2F+&'[x]/part-000000.parquet"


@pytest.fixture
def store(connect):
    """A store that is locked."""
    store = connect()
    assert store.lock()
    yield store
    store.unlock()


class StoreSuite:
    clock_step = 0.02
    """Seconds between two times that the store tells apart."""

    def test_it_is_a_store(self, store):
        assert isinstance(store, Store)
        assert store.url

    def test_a_name_is_created_once(self, store, connect):
        assert store.create("_jaxpaged/job.json", b"one")
        assert store.create("_jaxpaged/job.json", b"one")
        assert not store.create("_jaxpaged/job.json", b"two")
        assert not connect().create("_jaxpaged/job.json", b"")
        assert store.read("_jaxpaged/job.json") == b"one"

    def test_a_reader_sees_old_bytes_or_new_bytes(self, store, connect):
        reader, seen, is_over = connect(), [], threading.Event()
        store.replace("part", b"0" * 200_000)

        def read() -> None:
            while not is_over.is_set():
                seen.append(reader.read("part"))

        thread = threading.Thread(target=read)
        thread.start()
        for number in range(1, 20):
            data = str(number % 10).encode() * (200_000 + number)
            if number % 3:
                store.replace("part", data)
            else:
                scratch = store.scratch("part")
                scratch.write_bytes(data)
                store.publish(scratch, "part", is_new=False)
        is_over.set()
        thread.join()

        assert len(seen) > 1
        assert all(data is not None and len(set(data)) == 1 for data in seen)

    def test_a_published_file_is_gone_from_its_scratch(self, store, connect):
        scratch = store.scratch("deep/part-000000.parquet")
        assert scratch.parent.is_dir()
        scratch.write_bytes(b"rows")

        assert store.read("part-000000.parquet") is None
        store.publish(scratch, "part-000000.parquet", is_new=False)

        assert not scratch.exists()
        assert connect().read("part-000000.parquet") == b"rows"
        scratch.write_bytes(b"other rows")
        assert store.publish(scratch, "part-000000.parquet", is_new=False)
        assert store.read("part-000000.parquet") == b"other rows"

    def test_a_file_published_as_new_never_replaces_another(self, store, connect):
        scratch = store.scratch("part")
        scratch.write_bytes(b"mine")
        assert store.publish(scratch, "part", is_new=True)

        late = connect()
        scratch = late.scratch("part")
        scratch.write_bytes(b"late")
        assert not late.publish(scratch, "part", is_new=True)
        assert store.read("part") == b"mine"
        scratch.write_bytes(b"mine")
        assert late.publish(scratch, "part", is_new=True), "its reply was lost"

    def test_names_may_hold_whatever_a_file_name_may(self, store):
        store.replace(ODD_NAME, b"x")
        store.copy(ODD_NAME, f"{ODD_NAME}.copy")

        folder, _, name = ODD_NAME.rpartition("/")
        assert store.read(ODD_NAME) == b"x"
        assert store.entries(folder) == {name: 1, f"{name}.copy": 1}
        store.delete(ODD_NAME)
        assert store.entries(folder) == {f"{name}.copy": 1}

    def test_entries_are_what_lies_directly_in_a_folder(self, store):
        store.replace("part-1", b"12345")
        store.replace("part-0", b"")
        store.replace("inner/file", b"1")
        store.replace("inner/deeper/file", b"1")
        store.replace("inner-too", b"1")

        found = store.entries()
        found.pop("_jaxpaged", None)
        assert found == {"inner": None, "inner-too": 1, "part-0": 0, "part-1": 5}
        assert list(found) == sorted(found)
        assert store.entries("inner") == {"deeper": None, "file": 1}

    def test_what_is_missing_is_no_error_but_to_open_or_copy(self, store):
        assert store.read("no/thing") is None
        assert store.modified("no/thing") is None
        assert store.read_log("no/thing") is None
        assert store.entries("no/thing") == {}
        assert store.logs("no/thing") == []
        store.delete("no/thing")
        store.delete_log("no/thing")
        with pytest.raises(StorageError, match=r"no/thing"):
            store.open("no/thing")
        with pytest.raises(StorageError, match=r"no/thing"):
            store.copy("no/thing", "other")
        assert store.read("other") is None

    def test_an_open_file_can_be_sought_in(self, store):
        table = pa.table({"x": list(range(50_000))})
        scratch = store.scratch("part")
        pq.write_table(table, scratch, row_group_size=20_000)
        data = scratch.read_bytes()
        store.publish(scratch, "part", is_new=False)

        with store.open("part") as file:
            assert file.read(4) == b"PAR1"
            assert file.seek(-4, 2) == len(data) - 4
            assert file.read() == b"PAR1"
            assert file.read() == b""
            file.seek(0)
            assert file.read() == data
            assert pq.ParquetFile(file).read().equals(table)

    def test_an_empty_file_is_one(self, store):
        assert store.create("empty", b"")
        assert store.read("empty") == b""
        with store.open("empty") as file:
            assert file.read() == b""

    def test_a_copy_outlives_what_it_was_copied_from(self, store):
        store.replace("part", b"old")
        store.replace("other", b"in the way")
        store.copy("part", "revisions/part")
        store.copy("part", "other")
        store.replace("part", b"new")

        assert store.read("revisions/part") == b"old"
        assert store.read("other") == b"old"
        store.delete("other")
        assert store.read("revisions/part") == b"old"

    def test_the_time_of_a_name_is_that_of_its_last_write(self, store):
        store.replace("beat", b"1")
        first = store.modified("beat")
        time.sleep(self.clock_step)
        store.replace("beat", b"2")
        second = store.modified("beat")

        assert first is not None
        assert second is not None
        assert abs(time.time() - second) < 60
        assert second > first

    def test_a_log_holds_all_that_was_appended(self, store, connect):
        for number in range(4):
            store.append("journal/000003", b"record %d;" % number)
        store.append("journal/00000", b"another log")
        other = connect()
        other.append("journal/000003", b"from a later run")

        assert store.read_log("journal/000003") == (
            b"record 0;record 1;record 2;record 3;from a later run"
        )
        assert other.logs("journal") == ["00000", "000003"]
        other.delete_log("journal/000003")
        assert store.logs("journal") == ["00000"]
        assert store.read_log("journal/000003") is None

    def test_a_log_begins_anew_after_it_was_deleted(self, store):
        store.append("journal/0", b"one")
        store.append("journal/0", b"two")
        store.delete_log("journal/0")
        store.append("journal/0", b"three")

        assert store.read_log("journal/0") == b"three"

    def test_equal_records_are_all_kept(self, store, connect):
        for _ in range(3):
            store.append("journal/0", b"same")
        connect().append("journal/0", b"same")

        assert store.read_log("journal/0") == b"same" * 4

    @pytest.mark.parametrize("num_bytes", range(10))
    def test_a_log_is_cut_at_any_byte(self, store, connect, num_bytes):
        for piece in (b"abc", b"d", b"", b"efgh", b"i"):
            store.append("journal/0", piece)

        connect().truncate("journal/0", num_bytes)

        assert store.read_log("journal/0") == b"abcdefghi"[:num_bytes]
        connect().append("journal/0", b"XYZ")
        assert store.read_log("journal/0") == b"abcdefghi"[:num_bytes] + b"XYZ"

    def test_the_writer_that_cut_a_log_goes_on_with_it(self, store):
        for piece in (b"abc", b"def", b"ghi"):
            store.append("journal/0", piece)
        store.truncate("journal/0", 4)
        store.append("journal/0", b"Z")

        assert store.read_log("journal/0") == b"abcdZ"

    def test_sweeping_keeps_everything_that_is_finished(self, store, connect):
        store.replace("part", b"rows")
        store.append("journal/0", b"record")
        before = store.entries()

        later = connect()
        later.sweep()

        assert later.entries() == before
        assert later.read("part") == b"rows"
        assert later.read_log("journal/0") == b"record"

    def test_unlocking_twice_is_fine(self, store):
        store.scratch("x").write_bytes(b"unfinished")
        store.unlock()
        store.unlock()
        assert store.lock()


class RacingStoreSuite(StoreSuite):
    """Also for writers that nothing but the names themselves keeps apart."""

    def test_of_many_that_create_a_name_at_once_one_wins(self, store, connect):
        claims = [str(number).encode() * 1000 for number in range(6)]
        stores = [store, *(connect() for _ in claims[1:])]
        start = threading.Barrier(len(claims))

        def create(pair: tuple[Store, bytes]) -> bool:
            start.wait()
            return pair[0].create("commits/000000.json", pair[1])

        with ThreadPoolExecutor(len(claims)) as threads:
            won = list(threads.map(create, zip(stores, claims, strict=True)))

        assert won.count(True) == 1
        assert store.read("commits/000000.json") == claims[won.index(True)]
