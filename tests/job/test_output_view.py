import json
from collections.abc import Iterator

import pytest

from jaxpaged.errors import OutputConflictError
from jaxpaged.job.output import commit, history, journal, output_view
from jaxpaged.job.output.commit import CommitRecord
from jaxpaged.job.output.history import History
from jaxpaged.job.output.output_view import PRIVATE
from jaxpaged.job.tally import Tally
from jaxpaged.job.units import Segment, Units
from jaxpaged.storage.local_store import LocalStore

KNOWN = History(
    job=history.job_record(
        result_keys={"seed": 0}, run_keys={}, model={}, files=[], schema=[("id", "int64")]
    )
)
UNITS = Units(segments=(Segment(num_rows=4),), rows_per_part=2)
PARTS = ("part-000000.parquet", "part-000001.parquet")


@pytest.fixture
def store(tmp_path) -> Iterator[LocalStore]:
    """An empty folder that this process may write to."""
    made = LocalStore(tmp_path / "out", private=PRIVATE, durability="process")
    assert made.lock()
    yield made
    made.unlock()


def record(unit: int, revision: int = 0) -> CommitRecord:
    return CommitRecord(
        unit=unit,
        start=0,
        stop=0,
        revision=revision,
        fingerprint="",
        attempt=1,
        num_bytes=1,
        sha256="",
        counts=Tally(None).counts(),
        committed="",
    )


def put(store: LocalStore, *names: str, data: bytes = b"x") -> None:
    for name in names:
        assert store.create(name, data)


def test_readers_see_whole_parts_only_by_their_names(store):
    put(store, *PARTS, "_SUCCESS", "_hidden.parquet", ".hidden.parquet", "part-1.parquet.tmp")
    put(store, f"{PRIVATE}/superseded/part-000000.parquet.r0")
    (store.path / "part-000002.parquet").mkdir()

    assert output_view.visible_parts(store) == {
        PARTS[0]: 1,
        PARTS[1]: 1,
        "part-000002.parquet": None,
    }


def test_a_folder_is_ours_if_it_is_empty_or_a_job_began_in_it(store, tmp_path):
    output_view.check_ours(LocalStore(tmp_path / "none", private=PRIVATE))
    output_view.check_ours(store)
    put(store, history.JOB, data=b"anything")
    put(store, *PARTS, "note.txt")

    output_view.check_ours(store)


def test_a_folder_of_somebody_else_is_refused(store):
    put(store, "d", "b", "a", "c")

    with pytest.raises(OutputConflictError) as caught:
        output_view.check_ours(store)
    assert f"{store.path} is not empty and was not made by jaxpaged" in str(caught.value)
    assert "it holds a, b, c and 1 more; choose another folder" in str(caught.value)


def test_parts_alone_are_nobody_s(store):
    put(store, PARTS[0])

    with pytest.raises(OutputConflictError, match=r"it holds part-000000.parquet; choose another"):
        output_view.check_ours(store)


@pytest.mark.parametrize(
    "name", [PARTS[0], f"{commit.FOLDER}/000000-r0.json", f"{journal.FOLDER}/000000"]
)
def test_parts_records_and_journals_are_results(store, name):
    put(store, history.JOB, output_view.REPORT, f"{PRIVATE}/attempts/000001.json")
    assert not output_view.has_results(store)

    put(store, name)
    assert output_view.has_results(store)


def test_a_job_is_finished_if_its_mark_is_about_it_and_its_parts(store):
    def mark(**changes: object) -> bool:
        summary = {"fingerprint": KNOWN.fingerprint, "part_bytes": dict.fromkeys(PARTS, 1)}
        store.replace(output_view.SUCCESS, json.dumps(summary | changes).encode())
        return output_view.is_finished(store, KNOWN, UNITS)

    assert not output_view.is_finished(store, KNOWN, UNITS)
    put(store, *PARTS)
    assert not output_view.is_finished(store, KNOWN, UNITS)
    assert mark()
    assert not mark(fingerprint="f")
    assert not mark(part_bytes={PARTS[0]: 1})
    assert not mark(part_bytes={PARTS[0]: 1, PARTS[1]: 2})
    assert not mark(part_bytes=None)
    put(store, "part-000002.parquet")
    assert not mark()
    assert not mark(part_bytes=dict.fromkeys([*PARTS, "part-000002.parquet"], 1))
    store.delete("part-000002.parquet")
    assert mark()
    store.replace(output_view.SUCCESS, b"{")
    assert not output_view.is_finished(store, KNOWN, UNITS)


def test_a_retry_is_pending_until_each_of_its_units_has_its_record(store):
    first = KNOWN.retry(where="a = 1", settings={}, units=[0, 2], rows=2)
    known = KNOWN.followed_by(first)
    put(store, *(record(unit).name for unit in range(3)))
    assert output_view.pending_retry(store, KNOWN) is None
    assert output_view.pending_retry(store, known) == first

    put(store, record(0, revision=1).name, record(1, revision=1).name)
    assert output_view.pending_retry(store, known) == first
    put(store, record(2, revision=1).name)
    assert output_view.pending_retry(store, known) is None

    second = known.retry(where="a = 2", settings={}, units=[2], rows=1)
    known = known.followed_by(second)
    assert output_view.pending_retry(store, known) == second
    put(store, record(2, revision=2).name)
    assert output_view.pending_retry(store, known) is None


def test_an_extension_is_no_retry(store):
    assert output_view.pending_retry(store, KNOWN.followed_by(KNOWN.extension([]))) is None


def test_the_latest_record_of_a_unit_counts(store):
    records = [record(unit) for unit in range(20)]
    later = [record(3, revision=2), record(3, revision=10), record(19, revision=1)]
    for one in (*records, *later):
        put(store, one.name, data=one.to_bytes())

    found = output_view.current_records(store, [19, 3, 25, 4])

    assert found == [later[2], later[1], records[4]]
    assert [one.unit for one in output_view.current_records(store, range(30))] == list(range(20))
    store.replace(record(4).name, b"{")
    with pytest.raises(OutputConflictError, match=r"000004-r0.json is no commit record"):
        output_view.current_records(store, range(30))


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"null", b"\xff", b"[" * 100_000])
def test_what_is_no_json_object_is_none(store, data):
    put(store, "x", data=data)

    assert output_view.read_json(store, "x") is None
    assert output_view.read_json(store, "missing") is None
    (store.path / "folder").mkdir()
    assert output_view.read_json(store, "folder") is None


def test_some_names_stand_for_many():
    assert output_view.some(["a"]) == "a"
    assert output_view.some(["a", "b", "c"]) == "a, b, c"
    assert output_view.some([f"{i}" for i in range(1234)]) == "0, 1, 2 and 1,231 more"


def test_looking_changes_nothing(tmp_path):
    nowhere = LocalStore(tmp_path / "none", private=PRIVATE)

    assert not output_view.has_results(nowhere)
    assert not output_view.is_finished(nowhere, KNOWN, UNITS)
    assert output_view.pending_retry(nowhere, KNOWN) is None
    assert not nowhere.path.exists()
