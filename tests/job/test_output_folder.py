import json

import folder_stamps
import pytest
from failing_disk import NumberedDisk
from five_rows import (
    KNOWN,
    NAMES,
    RETRIED,
    SCHEMA,
    UNITS,
    file_record,
    finish,
    job_of,
    local,
    table,
    write,
    writing,
)
from job_output import parts, rows
from lockless_store import LocklessStore, StoreClock

from jaxpaged.errors import OutputConflictError, StorageError
from jaxpaged.job.output import attempt as attempts
from jaxpaged.job.output import commit, history, output_view, part_file
from jaxpaged.job.output.attempt import Attempt
from jaxpaged.job.output.output_folder import OutputFolder, Recovery
from jaxpaged.job.output.output_view import PRIVATE
from jaxpaged.job.output.writer import PartWriter
from jaxpaged.storage.local_store import LocalStore


@pytest.fixture
def store(tmp_path) -> LocalStore:
    """A folder with the whole job."""
    made = local(tmp_path / "out")
    with writing(made) as folder:
        finish(folder, list(UNITS))
        folder.write_report({"rows": 5})
    return made


def test_a_finished_folder_says_so(store):
    assert output_view.is_finished(store, KNOWN, UNITS)
    assert output_view.read_json(store, output_view.REPORT) == {"rows": 5}
    summary = json.loads((store.path / "_SUCCESS").read_text())
    assert summary.pop("finished").startswith("20")
    assert summary == {
        "rows": 5,
        "fingerprint": KNOWN.fingerprint,
        "revision": 0,
        "part_bytes": {name: (store.path / name).stat().st_size for name in NAMES},
    }


def test_only_parts_are_visible_and_nothing_is_left_aside(store):
    visible = sorted(path.name for path in store.path.iterdir() if path.name[0] not in "_.")

    assert visible == NAMES
    assert [row["id"] for row in rows(store.path)] == list(range(5))
    assert list((store.path / PRIVATE / "tmp").iterdir()) == []


def test_a_record_says_what_the_part_is(store):
    for unit in UNITS:
        record = commit.read(store, unit.index, 0)
        with store.open(unit.part_name) as file:
            assert record.sha256 == part_file.sha256(file)
        assert record.is_of(unit)
        assert record.num_bytes == (store.path / unit.part_name).stat().st_size
        assert (record.attempt, record.adopted_by) == (1, None)
        assert record.counts.rows == unit.num_rows
        assert record.counts.tokens["completion"] == 2 * unit.num_rows
    assert commit.read(store, 0, 0).counts.errors == {"bad_type": 1}


def test_each_step_of_a_commit_is_on_the_disk_before_the_next(tmp_path):
    disk = NumberedDisk()
    store = LocalStore(tmp_path / "out", private=PRIVATE, disk=disk)
    with writing(store) as folder:
        del disk.steps[:]
        write(folder, UNITS[0])

        assert disk.steps == [
            "sync tmp/part-000000.parquet.tmp",
            "rename out/part-000000.parquet",
            f"sync {tmp_path.name}/out",
            "make_folder _jaxpaged/commits",
            "sync out/_jaxpaged",
            "write tmp/_jaxpaged-commits-000000-r0.json.tmp",
            "sync tmp/_jaxpaged-commits-000000-r0.json.tmp",
            "link commits/000000-r0.json",
            "sync _jaxpaged/commits",
            "unlink tmp/_jaxpaged-commits-000000-r0.json.tmp",
        ]


def test_who_wants_no_durability_flushes_nothing(tmp_path):
    disk = NumberedDisk()
    with writing(local(tmp_path / "out", disk)) as folder:
        finish(folder, list(UNITS))

    assert [step for step in disk.steps if step.startswith("sync")] == []
    assert len([step for step in disk.steps if step.startswith("link commits/")]) == 3


def test_the_job_s_record_is_written_once(store):
    before = folder_stamps.of_all(store.path)

    for wanted in (KNOWN, RETRIED, RETRIED):
        with writing(store, wanted) as folder:
            assert folder.attempt.number > 1

    after = folder_stamps.of_all(store.path)
    assert after[history.JOB] == before[history.JOB]
    assert sorted(after.keys() - before.keys()) == ["_jaxpaged/revisions/000001.json"]
    # A folder that became another one's is not finished before it is.
    assert before.keys() - after.keys() == {"_SUCCESS"}
    assert history.read(store) == RETRIED


def test_a_folder_that_is_finished_stays_so_for_the_same_history(store):
    with writing(store):
        assert output_view.is_finished(store, KNOWN, UNITS)


def test_a_history_that_changed_meanwhile_is_refused(store):
    other = KNOWN.followed_by(KNOWN.extension([file_record("b", 1)]))
    with writing(store, RETRIED):
        pass
    before = folder_stamps.of_all(store.path)

    for seen, wanted in ((KNOWN, KNOWN), (KNOWN, other), (None, KNOWN)):
        with (
            Attempt(store) as attempt,
            OutputFolder(store, attempt, schema=SCHEMA, scoring=None) as folder,
            pytest.raises(OutputConflictError, match=r"another process changed .*/out while"),
        ):
            folder.claim(seen, wanted)
    assert folder_stamps.of_all(store.path) == before


@pytest.mark.parametrize("is_readable", [True, False])
def test_a_job_that_completed_nothing_makes_way_for_another(tmp_path, is_readable):
    store = local(tmp_path / "out")
    with writing(store, job_of(seed=1)) as folder:
        folder.write_report({})
    if not is_readable:
        (store.path / history.JOB).write_text("{")
    with (
        Attempt(store) as attempt,
        OutputFolder(store, attempt, schema=SCHEMA, scoring=None) as folder,
    ):
        folder.claim(None, KNOWN)
        assert history.read(store) == KNOWN
        assert folder.recover(UNITS) == Recovery(committed=frozenset())
        write(folder, UNITS[0])

    with writing(store) as folder:
        assert folder.recover(UNITS).committed == {0}


def test_revisions_of_nothing_make_way_too(tmp_path):
    store = local(tmp_path / "out")
    with writing(store):
        revision = RETRIED.revisions[0]
        assert store.create(revision.name, history.to_bytes(revision))
    assert history.read(store) == RETRIED

    with writing(store, KNOWN):
        assert history.read(store) == KNOWN


def test_results_without_a_record_of_their_job_are_nobody_s(store):
    (store.path / history.JOB).unlink()
    before = folder_stamps.of_all(store.path)

    with pytest.raises(OutputConflictError) as caught, writing(store):
        pass
    assert "holds results, but no record of the job that made them" in str(caught.value)
    assert "restore _jaxpaged/job.json" in str(caught.value)
    assert folder_stamps.of_all(store.path) == before


def test_committed_parts_that_are_gone_or_changed_are_refused(store):
    records = output_view.current_records(store, range(3))
    with writing(store) as folder:
        output_view.check_committed(store, records, UNITS, KNOWN)
        (store.path / NAMES[0]).unlink()
        (store.path / NAMES[2]).write_bytes((store.path / NAMES[2]).read_bytes()[:-1])
        with pytest.raises(OutputConflictError) as caught:
            output_view.check_committed(store, records, UNITS, KNOWN)
        # Nothing that has a record is ever taken for a leftover.
        assert folder.recover(UNITS).committed == {0, 1, 2}
        assert parts(store.path) == NAMES[1:]

    assert caught.value.exit_code == 6
    assert f"2 committed parts in {store.path} are missing or changed" in str(caught.value)
    assert f"{NAMES[0]}, {NAMES[2]}; put them back" in str(caught.value)
    assert "`jaxpaged run JOB --repair`" in str(caught.value)
    assert not output_view.is_finished(store, KNOWN, UNITS)


def test_a_part_that_became_a_folder_is_a_changed_one(store):
    part = store.path / NAMES[1]
    part.unlink()
    part.mkdir()

    assert not output_view.is_finished(store, KNOWN, UNITS)
    records = output_view.current_records(store, range(3))
    with pytest.raises(OutputConflictError, match="1 committed parts"):
        output_view.check_committed(store, records, UNITS, KNOWN)


def test_what_is_in_the_way_is_one_message(store):
    (store.path / "_SUCCESS").unlink()
    (store.path / "_SUCCESS").mkdir()
    with (
        pytest.raises(StorageError, match=r"cannot write to .*_SUCCESS: Is a directory"),
        writing(store) as folder,
    ):
        folder.finish(KNOWN, {})

    (store.path / PRIVATE / "tmp" / "stray").mkdir()
    with (
        pytest.raises(StorageError, match=r"cannot write to .*tmp/stray: Is a directory"),
        writing(store),
    ):
        pass


def test_leftovers_are_swept_at_both_ends(store):
    aside = store.path / PRIVATE / "tmp"
    (aside / "part-000009.parquet.tmp").write_text("of a killed run")

    with writing(store):
        assert list(aside.iterdir()) == []
        (aside / "more.tmp").write_text("of this one")
    assert list(aside.iterdir()) == []


def test_a_part_that_does_not_read_back_stays_invisible(tmp_path):
    store = local(tmp_path / "out")
    with writing(store) as folder:
        folder.store.scratch(NAMES[0]).write_bytes(b"PAR1")
        with pytest.raises(StorageError, match="does not read back as it was written"):
            folder.commit(UNITS[0])
        with pytest.raises(StorageError, match=r"part-000001.parquet.tmp: does not read back"):
            folder.commit(UNITS[1])
        with PartWriter(folder) as writer:
            assert writer.write(UNITS[2], table(UNITS[2]))
        with folder.store.scratch(NAMES[2]).open("r+b") as file:
            file.seek(200)
            file.write(b"\xff" * 50)
        with pytest.raises(StorageError, match="does not read back"):
            folder.commit(UNITS[2])

    assert parts(store.path) == []
    assert commit.committed(store) == {}


def test_an_abandoned_part_leaves_nothing(tmp_path):
    store = local(tmp_path / "out")
    with writing(store) as folder, PartWriter(folder) as writer:
        assert not writer.write(UNITS[0], table(UNITS[0]).slice(1))
        assert list((store.path / PRIVATE / "tmp").iterdir())

    assert list((store.path / PRIVATE / "tmp").iterdir()) == []
    assert parts(store.path) == []


def test_a_full_disk_is_one_message(tmp_path):
    # /dev/full takes no byte; the part is written to it through a link.
    with writing(local(tmp_path / "out")) as folder:
        folder.store.scratch(NAMES[0]).symlink_to("/dev/full")
        with (
            pytest.raises(StorageError, match=r"cannot write to .*/out.*: .*No space left on dev"),
            PartWriter(folder) as writer,
        ):
            writer.write(UNITS[0], table(UNITS[0]))


def test_json_that_is_not_json_is_never_written(store):
    before = (store.path / output_view.REPORT).read_bytes()

    with writing(store) as folder, pytest.raises(ValueError, match="not JSON comp"):
        folder.write_report({"x": float("nan")})
    assert (store.path / output_view.REPORT).read_bytes() == before


def test_a_record_that_another_writer_made_is_a_conflict(tmp_path):
    store = local(tmp_path / "out")
    with writing(store) as folder:
        assert store.create(commit.record_name(0, 0), b"of another process")

        with pytest.raises(OutputConflictError, match=r"000000-r0.json exists already, made by an"):
            write(folder, UNITS[0])
    assert store.read(commit.record_name(0, 0)) == b"of another process"


def test_a_writer_that_was_replaced_commits_nothing(tmp_path):
    clock = StoreClock()
    slow, quick = (LocklessStore(tmp_path / "out", clock, name) for name in ("slow", "quick"))
    with writing(slow) as folder:
        write(folder, UNITS[0])
        with PartWriter(folder) as writer:
            assert writer.write(UNITS[1], table(UNITS[1]))
            clock.now += attempts.LEASE_SECONDS
            with writing(quick) as later:
                assert later.recover(UNITS).committed == {0}
                with pytest.raises(OutputConflictError, match=r"attempt 2 .* took over"):
                    writer.commit(UNITS[1])
                assert parts(quick.path) == NAMES[:1]
                write(later, UNITS[1])
            with pytest.raises(OutputConflictError, match=r"attempt 2 .* took over"):
                writer.commit(UNITS[1])

    assert commit.read(quick, 1, 0).attempt == 2
    assert [row["id"] for row in rows(quick.path)] == [0, 1, 2, 3]


def test_a_discarded_part_is_kept_out_of_sight(store):
    before = (store.path / NAMES[1]).read_bytes()
    with writing(store) as folder:
        folder.discard(UNITS[1])

        assert parts(store.path) == [NAMES[0], NAMES[2]]
        assert commit.committed(store) == {0: (0,), 2: (0,)}
        kept = store.path / output_view.REJECTED / f"{NAMES[1]}.a2"
        assert kept.read_bytes() == before
        assert folder.recover(UNITS).committed == {0, 2}
        write(folder, UNITS[1])
    assert commit.read(store, 1, 0).attempt == 2
    assert [row["id"] for row in rows(store.path)] == list(range(5))


def test_a_part_that_is_gone_can_be_discarded(store):
    (store.path / NAMES[1]).unlink()
    with writing(store) as folder:
        folder.discard(UNITS[1])

    assert commit.committed(store) == {0: (0,), 2: (0,)}
    assert not (store.path / output_view.REJECTED).exists()
