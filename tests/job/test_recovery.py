import dataclasses
import errno
import json
import pathlib
from collections.abc import Iterator

import folder_stamps
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from five_rows import (
    KNOWN,
    NAMES,
    RETRIED,
    UNITS,
    finish,
    job_of,
    local,
    retried,
    table,
    write,
    writing,
)
from job_output import parts, rows

from jaxpaged.errors import OutputConflictError, StorageError
from jaxpaged.job.output import commit, output_view
from jaxpaged.job.output.output_folder import Recovery
from jaxpaged.job.runner import run_job
from jaxpaged.job.units import Units
from jaxpaged.storage.disk import Disk
from jaxpaged.storage.local_store import LocalStore


@pytest.fixture
def store(tmp_path) -> LocalStore:
    """A folder with the whole job."""
    made = local(tmp_path / "out")
    with writing(made) as folder:
        finish(folder, list(UNITS))
    return made


class LostDisk(Disk):
    """Makes no link whose name ends so: the end comes between the part and its record."""

    def __init__(self, ending: str) -> None:
        self._ending = ending

    def link(self, path: pathlib.Path, target: pathlib.Path) -> None:
        if target.name.endswith(self._ending):
            raise OSError(errno.EIO, "Input/output error", str(target))
        super().link(path, target)


@pytest.fixture
def loose(store) -> LocalStore:
    """The same without the record of the unit in the middle, as after a kill."""
    (store.path / commit.record_name(1, 0)).unlink()
    (store.path / "_SUCCESS").unlink()
    return store


def test_a_whole_part_without_a_record_is_adopted(loose):
    before = folder_stamps.of_all(loose.path)
    with writing(loose) as folder:
        recovery = folder.recover(UNITS)

    assert recovery == Recovery(committed=frozenset({0, 1, 2}), adopted=(NAMES[1],))
    record = commit.read(loose, 1, 0)
    assert (record.attempt, record.adopted_by) == (1, 2)
    assert record.is_of(UNITS[1])
    assert record.counts.rows == 2
    after = folder_stamps.of_all(loose.path)
    assert after.keys() - before.keys() == {record.name}
    assert {name: after[name] for name in before} == before


@pytest.mark.parametrize("num_bytes", [0, 3, 500, -9, -1], ids=lambda n: f"{n} bytes")
def test_a_torn_part_without_a_record_is_removed(loose, num_bytes):
    part = loose.path / NAMES[1]
    part.write_bytes(part.read_bytes()[:num_bytes])

    with writing(loose) as folder:
        recovery = folder.recover(UNITS)
        assert recovery == Recovery(committed=frozenset({0, 2}), removed=(NAMES[1],))
        assert parts(loose.path) == [NAMES[0], NAMES[2]]
        write(folder, UNITS[1])
    assert [row["id"] for row in rows(loose.path)] == list(range(5))


def foreign(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Parts that read well and are not the second unit's."""
    with writing(local(path / "other"), job_of(seed=1)) as folder:
        units = Units(segments=job_of(seed=1).segments, rows_per_part=2)
        write(folder, units[1])
        yield path / "other" / NAMES[1]
    pq.write_table(table(UNITS[1]), path / "plain")
    yield path / "plain"
    with writing(local(path / "third")) as folder:
        write(folder, UNITS[0])
        yield path / "third" / NAMES[0]


def test_a_foreign_part_in_a_unit_s_place_is_refused_and_left_alone(loose, tmp_path):
    for other in foreign(tmp_path):
        (loose.path / NAMES[1]).write_bytes(other.read_bytes())
        before = folder_stamps.of_all(loose.path)

        with (
            pytest.raises(OutputConflictError, match=rf"{NAMES[1]} is no part of this job \(it"),
            writing(loose) as folder,
        ):
            folder.recover(UNITS)

        assert folder_stamps.of_all(loose.path) == before


def test_a_foreign_table_among_the_parts_is_refused_and_left_alone(store):
    pq.write_table(pa.table({"id": [9]}), store.path / "copy.parquet")
    before = folder_stamps.of_all(store.path)

    with (
        pytest.raises(OutputConflictError, match=r"copy.parquet is no part of this job; move it"),
        writing(store) as folder,
    ):
        folder.recover(UNITS)

    assert folder_stamps.of_all(store.path) == before
    assert not output_view.is_finished(store, KNOWN, UNITS)


def test_a_part_that_cannot_be_read_is_no_torn_one(loose):
    part = loose.path / NAMES[1]
    part.unlink()
    part.mkdir()
    with pytest.raises(StorageError, match=r"000001.parquet: Is a directory"), writing(loose) as f:
        f.recover(UNITS)
    assert part.is_dir()

    part.rmdir()
    part.symlink_to(part)
    with pytest.raises(StorageError, match=r"000001.parquet: Too many"), writing(loose) as folder:
        folder.recover(UNITS)
    assert part.is_symlink()


def test_a_part_is_visible_and_adopted_if_its_record_was_lost(tmp_path):
    lost = local(tmp_path / "out", LostDisk("000001-r0.json"))
    with writing(lost) as folder:
        write(folder, UNITS[0])
        with pytest.raises(StorageError, match="Input/output error"):
            write(folder, UNITS[1])

    assert [row["id"] for row in rows(lost.path)] == [0, 1, 2, 3]
    assert commit.committed(lost) == {0: (0,)}
    with writing(local(lost.path)) as folder:
        assert folder.recover(UNITS).adopted == (NAMES[1],)


def test_a_retry_keeps_the_part_it_replaces(store):
    before = folder_stamps.of_all(store.path)
    with writing(store, RETRIED) as folder:
        assert folder.recover_retry([retried(0), retried(1)]) == Recovery(committed=frozenset())
        write(folder, retried(0))

        after = folder_stamps.of_all(store.path)
        assert after[f"{output_view.SUPERSEDED}/{NAMES[0]}.r0"] == before[NAMES[0]]
        assert output_view.pending_retry(store, RETRIED) == RETRIED.revisions[0]
        write(folder, retried(1))
        assert output_view.pending_retry(store, RETRIED) is None
    with writing(store, RETRIED) as folder:
        found = folder.recover_retry([retried(0), retried(1)])
        assert found == Recovery(committed=frozenset({0, 1}))

    assert commit.committed(store) == {0: (0, 1), 1: (0, 1), 2: (0,)}
    assert [row["completion"] for row in rows(store.path)] == [
        *(None, "by revision 1", "by revision 1", "by revision 1"),
        "by revision 0",
    ]
    assert not list((store.path / output_view.SUPERSEDED).glob("*.parquet"))


def test_a_retried_part_without_a_record_is_adopted(store):
    lost = local(store.path, LostDisk("000001-r1.json"))
    with writing(lost, RETRIED) as folder:
        folder.recover_retry([retried(0), retried(1)])
        write(folder, retried(0))
        with pytest.raises(StorageError, match="Input/output error"):
            write(folder, retried(1))
    before = folder_stamps.of_all(store.path)

    with writing(store, RETRIED) as folder:
        found = folder.recover_retry([retried(0), retried(1)])

    assert found == Recovery(committed=frozenset({0, 1}), adopted=(NAMES[1],))
    assert commit.read(store, 1, 1).adopted_by == 3
    after = folder_stamps.of_all(store.path)
    assert {name: after[name] for name in before} == before


def test_a_torn_part_of_a_retry_gives_way_to_the_one_before(store):
    before = folder_stamps.of_all(store.path)
    with writing(store, RETRIED) as folder:
        folder.recover_retry([retried(0), retried(1)])
        write(folder, retried(0))
        write(folder, retried(1))
    (store.path / commit.record_name(1, 1)).unlink()
    part = store.path / NAMES[1]
    # Its last page is lost, its footer is not.
    data = bytearray(part.read_bytes())
    start = pq.read_metadata(part).row_group(0).column(0).data_page_offset
    data[start : start + 300] = bytes(300)
    part.unlink()
    part.write_bytes(data)

    with writing(store, RETRIED) as folder:
        found = folder.recover_retry([retried(0), retried(1)])
        assert found == Recovery(committed=frozenset({0}))
        assert part.read_bytes() == before[NAMES[1]][0]
        write(folder, retried(1))
        kept = store.path / output_view.SUPERSEDED / f"{NAMES[1]}.r0"
        assert kept.read_bytes() == before[NAMES[1]][0]
    assert [row["id"] for row in rows(store.path)] == list(range(5))


def test_a_part_of_two_retries_is_kept_from_each(store):
    twice = RETRIED.followed_by(RETRIED.retry(where="id = 3", settings={}, units=[1], rows=1))
    second = dataclasses.replace(UNITS[1], revision=2, fingerprint=twice.fingerprint)
    with writing(store, RETRIED) as folder:
        folder.recover_retry([retried(0), retried(1)])
        write(folder, retried(0))
        write(folder, retried(1))
    with writing(store, twice) as folder:
        assert folder.recover_retry([second]) == Recovery(committed=frozenset())
        write(folder, second)

    kept = sorted(path.name for path in (store.path / output_view.SUPERSEDED).iterdir())
    assert kept == [f"{NAMES[0]}.r0", f"{NAMES[1]}.r0", f"{NAMES[1]}.r1"]
    assert commit.committed(store)[1] == (0, 1, 2)
    assert rows(store.path)[3]["completion"] == "by revision 2"


@pytest.mark.parametrize("unit", [0, 99])
def test_a_record_about_another_unit_is_refused(write_rows, make_spec, engine, out, unit):
    write_rows(q=[f"q{i}" for i in range(12)])
    spec = make_spec(input={"prompt_column": "q"}, output={"rows_per_part": 4})
    run_job(spec, engine=engine())
    (out / "_SUCCESS").unlink()
    record = out / commit.record_name(1, 0)
    other = json.loads((out / commit.record_name(0, 0)).read_text()) | {"unit": unit}
    record.write_text(json.dumps(other))
    with pytest.raises(OutputConflictError, match="--repair"):
        run_job(spec, engine=engine())
