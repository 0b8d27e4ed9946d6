import json
import pathlib
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxpaged.errors import ConfigError, IdentityError, JobError, OutputConflictError
from jaxpaged.job import output_folder
from jaxpaged.job.output_folder import OutputFolder
from jaxpaged.job.units import Units
from jaxpaged.job.writer import PartWriter

SCHEMA = pa.schema([("id", pa.int64())])
UNITS = Units(num_rows=4, rows_per_part=2)
JOB: dict[str, object] = {"result_keys": {"seed": 0}, "input": {"files": ["a"]}}


def write_unit(folder: OutputFolder, index: int) -> None:
    unit = UNITS[index]
    with PartWriter(folder, SCHEMA) as writer:
        writer.write(unit, pa.table({"id": list(range(unit.start, unit.stop))}))


@pytest.fixture
def finished(tmp_path) -> pathlib.Path:
    """A folder with the whole job."""
    with OutputFolder(tmp_path / "out") as folder:
        folder.claim(JOB, UNITS)
        write_unit(folder, 0)
        write_unit(folder, 1)
        folder.write_report({"rows": 4})
        folder.finish({"rows": 4})
    return tmp_path / "out"


def test_a_finished_folder_says_so(finished, tmp_path):
    assert output_folder.is_finished(finished, JOB, UNITS)
    assert output_folder.read_report(finished) == {"rows": 4}
    assert json.loads((finished / "_SUCCESS").read_text()) == {
        "rows": 4,
        "part_bytes": {path.name: path.stat().st_size for path in finished.glob("*.parquet")},
    }
    assert not output_folder.is_finished(tmp_path / "other", JOB, UNITS)


def test_only_parts_are_visible_and_nothing_is_left_aside(finished):
    visible = sorted(path.name for path in finished.iterdir() if path.name[0] not in "_.")

    assert visible == ["part-000000.parquet", "part-000001.parquet"]
    assert list((finished / "_jaxpaged" / "tmp").iterdir()) == []


def test_a_missing_part_makes_the_job_unfinished(finished):
    (finished / "part-000001.parquet").unlink()

    assert not output_folder.is_finished(finished, JOB, UNITS)
    with OutputFolder(finished) as folder:
        folder.claim(JOB, UNITS)
        assert folder.finished_units(UNITS, SCHEMA) == ({0}, [])
        assert not (finished / "_SUCCESS").exists()


def test_a_damaged_part_is_removed_and_redone(finished):
    part = finished / "part-000000.parquet"
    part.write_bytes(part.read_bytes()[:-20])
    pq.write_table(pa.table({"id": [2]}), finished / "part-000001.parquet")

    with OutputFolder(finished) as folder:
        folder.claim(JOB, UNITS)
        assert folder.finished_units(UNITS, SCHEMA) == (
            set(),
            ["part-000000.parquet", "part-000001.parquet"],
        )
    assert not part.exists()


def test_parts_that_changed_since_make_the_job_unfinished(finished):
    part = finished / "part-000000.parquet"
    part.write_bytes(part.read_bytes()[:30])
    assert not output_folder.is_finished(finished, JOB, UNITS)

    part.unlink()
    part.mkdir()
    assert not output_folder.is_finished(finished, JOB, UNITS)


def test_a_directory_in_a_file_s_place_is_one_message(finished):
    part = finished / "part-000001.parquet"
    part.unlink()
    part.mkdir()
    with OutputFolder(finished) as folder:
        folder.claim(JOB, UNITS)
        with pytest.raises(JobError, match=r"000001.parquet: cannot read this part: Is a dir"):
            folder.finished_units(UNITS, SCHEMA)
    part.rmdir()

    (finished / "_SUCCESS").mkdir()
    with (
        OutputFolder(finished) as folder,
        pytest.raises(JobError, match=r"cannot write to .*_SUCCESS: Is a directory"),
    ):
        folder.claim(JOB, UNITS)

    (finished / "_jaxpaged" / "tmp" / "stray").mkdir()
    with (
        pytest.raises(JobError, match=r"cannot write to .*tmp/stray: Is a directory"),
        OutputFolder(finished),
    ):
        pass


def test_a_record_of_another_format_is_refused(finished):
    record = finished / "_jaxpaged" / "job.json"
    record.write_text(json.dumps(JOB | {"format": 99}))

    with pytest.raises(IdentityError, match=r"format of the record: 99 -> none"):
        output_folder.is_finished(finished, JOB, UNITS)


def test_parts_of_a_job_that_differs_are_refused_with_the_difference(finished):
    changed = {"result_keys": {"seed": 1}, "input": {"files": ["a"]}, "run_keys": {"x": 1}}

    with pytest.raises(IdentityError, match=r"2 parts of a job that differs") as caught:
        output_folder.is_finished(finished, changed, UNITS)
    assert "\n  seed: 0 -> 1\n" in str(caught.value)

    with OutputFolder(finished) as folder, pytest.raises(IdentityError):
        folder.claim(changed, UNITS)
    assert (finished / "_SUCCESS").exists()


def test_a_folder_without_parts_is_claimed_anew(tmp_path):
    other: dict[str, object] = {"result_keys": {"seed": 1}, "input": {}}
    with OutputFolder(tmp_path / "out") as folder:
        folder.claim(other, UNITS)
    with OutputFolder(tmp_path / "out") as folder:
        folder.claim(JOB, UNITS)
        write_unit(folder, 0)

    assert not output_folder.is_finished(tmp_path / "out", JOB, UNITS)
    with pytest.raises(IdentityError):
        output_folder.is_finished(tmp_path / "out", other, UNITS)


def test_a_folder_of_somebody_else_is_refused_and_left_alone(tmp_path):
    for name in "abcd":
        (tmp_path / name).write_text("precious")

    with pytest.raises(OutputConflictError, match=r"holds a, b, c and 1 more; choose another"):
        OutputFolder(tmp_path)
    with pytest.raises(OutputConflictError, match=r"a is a file; choose a folder"):
        OutputFolder(tmp_path / "a")
    assert sorted(path.name for path in tmp_path.iterdir()) == list("abcd")


def test_a_foreign_parquet_file_among_the_parts_is_refused(finished):
    pq.write_table(pa.table({"id": [9]}), finished / "copy.parquet")

    with pytest.raises(OutputConflictError, match=r"copy.parquet is no part of this job"):
        output_folder.is_finished(finished, JOB, UNITS)


def test_parts_without_a_readable_record_are_refused(finished):
    (finished / "_jaxpaged" / "job.json").write_text("{")

    with pytest.raises(OutputConflictError, match=r"job.json cannot be read"):
        output_folder.is_finished(finished, JOB, UNITS)


def test_two_processes_cannot_write_at_once(tmp_path):
    script = (
        "import pathlib, sys\n"
        "from jaxpaged.job.output_folder import OutputFolder\n"
        "try: OutputFolder(pathlib.Path(sys.argv[1]))\n"
        "except Exception as error: sys.exit(f'{error.exit_code}: {error}')\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "out")]

    with OutputFolder(tmp_path / "out"):
        second = subprocess.run(command, capture_output=True, text=True, check=False)
    third = subprocess.run(command, capture_output=True, text=True, check=False)

    assert second.stderr.startswith("6: output.path: another process is writing to")
    assert third.returncode == 0


def test_a_place_that_cannot_be_written_to_is_a_config_error(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError, match=r"output.path: cannot (read|write to) .*Not a directory"):
        OutputFolder(tmp_path / "file" / "out")
    with pytest.raises(ConfigError, match=r"output.path: cannot write to /proc/none/out"):
        OutputFolder(pathlib.Path("/proc/none/out"))


def test_a_part_that_does_not_read_back_stays_invisible(tmp_path):
    with OutputFolder(tmp_path / "out") as folder:
        folder.aside("part-000000.parquet").write_bytes(b"PAR1")
        with pytest.raises(JobError, match="does not read back as it was written"):
            folder.publish_part("part-000000.parquet", 2, SCHEMA)
    assert not list((tmp_path / "out").glob("*.parquet"))


def test_an_abandoned_part_leaves_nothing(tmp_path):
    with OutputFolder(tmp_path / "out") as folder, PartWriter(folder, SCHEMA) as writer:
        writer.write(UNITS[0], pa.table({"id": [0]}))
        assert list((tmp_path / "out" / "_jaxpaged" / "tmp").iterdir())

    assert list((tmp_path / "out" / "_jaxpaged" / "tmp").iterdir()) == []
    assert not list((tmp_path / "out").glob("*.parquet"))


def test_a_full_disk_is_one_message(tmp_path):
    # /dev/full takes no byte; the part is written to it through a link.
    with OutputFolder(tmp_path / "out") as folder:
        folder.aside("part-000000.parquet").symlink_to("/dev/full")
        with (
            pytest.raises(JobError, match=r"cannot write to .*/out: .*No space left on device"),
            PartWriter(folder, SCHEMA) as writer,
        ):
            writer.write(UNITS[0], pa.table({"id": [0, 1]}))


def test_json_that_is_not_json_is_never_written(tmp_path):
    with OutputFolder(tmp_path / "out") as folder, pytest.raises(ValueError, match="not JSON comp"):
        folder.write_report({"x": float("nan")})
