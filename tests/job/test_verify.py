"""Folders of real jobs, damaged in every way that a disk or a person might."""

import contextlib
import errno
import fcntl
import io
import json
import os
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import rich.console
from scripted_engine import ScriptedEngine

from jaxpaged.errors import OutputConflictError
from jaxpaged.job.interrupt import JobInterrupted
from jaxpaged.job.look import verify_table
from jaxpaged.job.look.verify import Problem, Verification, verify
from jaxpaged.job.output import part_file
from jaxpaged.job.planned_job import RunOptions
from jaxpaged.job.retry import retry_job
from jaxpaged.job.runner import run_job
from jaxpaged.job.spec import JobSpec
from jaxpaged.job.tally import Tally
from jaxpaged.job.units import Unit
from jaxpaged.storage.local_store import LocalStore

ROWS_PER_PART = 4


def part(unit: int) -> str:
    return f"part-{unit:06d}.parquet"


def record(unit: int, revision: int = 0) -> str:
    return f"_jaxpaged/commits/{unit:06d}-r{revision}.json"


def look(out: pathlib.Path) -> Verification:
    return verify(LocalStore(out, private="_jaxpaged"))


def flip(path: pathlib.Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def change_json(path: pathlib.Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def forge(
    out: pathlib.Path, unit: int, change: Callable[[pa.Table], pa.Table], *, recounts: bool = True
) -> None:
    """Replaces a part by another of the same unit, and makes the records agree with it."""
    path, about = out / part(unit), json.loads((out / record(unit)).read_text())
    table = change(pq.read_table(path))
    names = ("start", "stop", "revision", "fingerprint")
    owner = Unit(index=unit, **{name: about[name] for name in names})
    with part_file.open_writer(str(path), table.schema) as writer:
        writer.write_table(table)
        part_file.add_metadata(writer, owner, about["attempt"])
    with path.open("rb") as file:
        changes: dict[str, Any] = {"sha256": part_file.sha256(file), "num_bytes": file.tell()}
    if recounts:
        tally = Tally(None)
        tally.add(table)
        counts = tally.counts()
        changes["counts"] = about["counts"] | {
            "rows": counts.rows,
            "finish_reasons": counts.finish_reasons,
            "errors": counts.errors,
            "tokens": counts.tokens,
        }
    change_json(out / record(unit), **changes)
    summary = json.loads((out / "_SUCCESS").read_text())
    summary["part_bytes"][part(unit)] = changes["num_bytes"]
    (out / "_SUCCESS").write_text(json.dumps(summary))


def with_column(table: pa.Table, name: str, values: list) -> pa.Table:
    place = table.schema.get_field_index(name)
    return table.set_column(place, name, pa.array(values, table.schema.field(name).type))


@pytest.fixture(scope="module")
def run(tmp_path_factory, model, tokenizer) -> Callable[..., pathlib.Path]:
    """Runs a job of three parts over two files, with a failed row in the second part."""
    rows = tmp_path_factory.mktemp("rows")
    first = pa.table({"q": ["a0", "a1", "a2", "a3", "a4", None, "a6"]})
    pq.write_table(first, rows / "a.parquet", row_group_size=3)
    pq.write_table(pa.table({"q": ["b0", "b1"]}), rows / "b.parquet")

    def run_into(
        out: pathlib.Path, answer: str = "yes", options: RunOptions | None = None
    ) -> pathlib.Path:
        spec = JobSpec.from_dict(
            {
                "model": str(model),
                "input": {"path": str(rows), "prompt_column": "q"},
                "output": {"path": str(out), "rows_per_part": ROWS_PER_PART},
            }
        )
        double = ScriptedEngine(tokenizer, answer=lambda text: answer)
        run_job(spec, engine=double, options=options)
        return out

    return run_into


@pytest.fixture(scope="module")
def original(run, tmp_path_factory) -> pathlib.Path:
    return run(tmp_path_factory.mktemp("outputs") / "out")


@pytest.fixture
def finished(original, out) -> pathlib.Path:
    """A folder of that job, for the test to damage."""
    return shutil.copytree(original, out)


def test_a_finished_job_is_right(finished):
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}

    found = look(finished)

    assert found == Verification(
        problems=(), parts=3, rows=9, units=3, is_finished=True, is_running=False
    )
    assert (found.exit_code, found.rejected) == (0, frozenset())
    assert found.to_json()["is_right"] is True
    assert {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()} == before


def test_a_folder_without_a_job_is_refused(tmp_path):
    with pytest.raises(OutputConflictError, match=r"there is no _jaxpaged/job\.json in it"):
        look(tmp_path / "nothing")


def test_a_broken_history_is_refused(finished):
    (finished / "_jaxpaged" / "job.json").write_text("{")
    with pytest.raises(OutputConflictError, match="is no JSON object"):
        look(finished)


def test_a_history_that_does_not_say_the_units_is_refused(finished):
    path = finished / "_jaxpaged" / "job.json"
    job = json.loads(path.read_text())
    job["result_keys"]["output.rows_per_part"] = None
    path.write_text(json.dumps(job))
    with pytest.raises(OutputConflictError, match=r"its output\.rows_per_part is None"):
        look(finished)


@pytest.mark.parametrize("place", [40, -30, -1, 2], ids=["page", "footer", "end", "beginning"])
def test_a_flipped_bit_is_found(finished, place):
    flip(finished / part(1), place)

    found = look(finished)

    assert [(p.name, p.unit) for p in found.problems] == [(part(1), 1)]
    assert "has other bytes than its commit record says" in found.problems[0].text
    assert (found.parts, found.rows, found.exit_code) == (2, 5, 6)
    assert found.rejected == {1}


def test_a_truncated_part_is_found(finished):
    path = finished / part(0)
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-100])

    (problem,) = (p for p in look(finished).problems if p.name != "_SUCCESS")

    assert problem.unit == 0
    assert f"has {size - 100:,} bytes, not {size:,} as its commit record says" in problem.text
    assert "does not read as Parquet" in problem.text


def test_swapped_parts_are_found(finished):
    (finished / part(0)).rename(finished / "x")
    (finished / part(2)).rename(finished / part(0))
    (finished / "x").rename(finished / part(2))

    found = look(finished)

    assert found.rejected == {0, 2}
    assert "it says it is unit 2, rows 8 to 9" in found.problems[0].text


def test_a_part_of_somebody_else_is_found(finished):
    pq.write_table(pa.table({"x": [1, 2]}), finished / part(1))

    (problem,) = look(finished).problems

    assert problem.unit == 1
    assert "no part of jaxpaged's" in problem.text


def test_a_part_of_another_run_of_the_same_job_is_found(finished, run, tmp_path):
    other = run(tmp_path / "other", answer="no")
    shutil.copyfile(other / part(1), finished / part(1))

    assert look(finished).rejected == {1}


def test_a_missing_part_is_found(finished):
    (finished / part(1)).unlink()

    found = look(finished)

    assert found.rejected == {1}
    assert "is missing, though it has a commit record" in found.problems[0].text
    assert found.is_finished is False


def test_a_folder_in_the_place_of_a_part_is_found(finished):
    (finished / part(1)).unlink()
    (finished / part(1)).mkdir()

    (problem,) = look(finished).problems

    assert problem.unit == 1
    assert "is a folder, not a file" in problem.text


def test_a_missing_record_is_told_of_and_the_part_is_kept(finished):
    (finished / record(1)).unlink()

    found = look(finished)

    assert (found.problems[0].name, found.problems[0].unit) == (part(1), None)
    assert "is whole, but has no commit record" in found.problems[0].text
    assert found.rejected == frozenset()
    assert (found.parts, found.rows) == (2, 5)


def test_a_part_without_a_record_that_is_not_whole_is_told_of(finished):
    (finished / record(1)).unlink()
    flip(finished / part(1), 40)

    problems = look(finished).problems

    assert (problems[0].name, problems[0].unit) == (part(1), None)
    assert "has no commit record and is not whole" in problems[0].text


def test_a_part_without_a_record_that_is_not_ours_is_told_of(finished):
    (finished / record(1)).unlink()
    shutil.copyfile(finished / part(0), finished / part(1))

    assert "is no part of this job" in look(finished).problems[0].text


@pytest.mark.parametrize("content", [b"", b"{}", b"[" * 100_000, b"\xff", b'{"unit": 1}'])
def test_a_record_that_is_none_is_found(finished, content):
    (finished / record(1)).write_bytes(content)

    (problem,) = look(finished).problems

    assert (problem.name, problem.unit) == (part(1), 1)
    assert f"has a commit record, {record(1)}, that cannot be read as one" in problem.text


@pytest.mark.parametrize("change", [{"stop": 0}, {"start": 0}, {"fingerprint": "f" * 64}])
def test_a_record_of_other_rows_is_found(finished, change):
    change_json(finished / record(1), **change)

    (problem,) = look(finished).problems

    assert problem.unit == 1
    assert "that is about other rows, or of another job" in problem.text


def test_a_record_of_a_revision_that_never_was_is_found(finished):
    shutil.copyfile(finished / record(1), finished / record(1, revision=3))

    (problem,) = look(finished).problems

    assert problem.unit == 1
    assert "of a revision that the job does not have" in problem.text


def test_a_record_of_a_unit_that_never_was_is_found(finished):
    shutil.copyfile(finished / record(1), finished / record(3))

    assert [(p.name, p.unit) for p in look(finished).problems] == [(record(3), None)]


def test_counts_that_are_not_those_of_the_rows_are_found(finished):
    counts = json.loads((finished / record(1)).read_text())["counts"]
    counts["tokens"]["prompt"] += 1
    counts["finish_reasons"] = {"stop": 4}
    counts["completion_lengths"] = {"7": 4}
    change_json(finished / record(1), counts=counts)

    (problem,) = look(finished).problems

    assert "comes to other tokens than its commit record says" in problem.text
    assert "comes to other rows by finish reason than its commit record says" in problem.text
    assert "comes to other completions by length than its commit record says" in problem.text
    assert "error code" not in problem.text
    assert "prompts by length" not in problem.text


def test_rows_in_another_order_are_found_though_everything_else_agrees(finished):
    forge(finished, 1, lambda table: table.take(pa.array([0, 2, 1, 3])))

    (problem,) = look(finished).problems

    assert (problem.name, problem.unit) == (part(1), 1)
    assert (
        "row 1 of it is a.parquet, row group 2, row 0, where a.parquet, row group 1, row 2 belongs"
        in problem.text
    )


def test_rows_of_another_unit_are_found_though_everything_else_agrees(finished):
    other = pq.read_table(finished / part(0))

    forge(finished, 1, lambda table: other)

    assert "holds other rows than it should" in look(finished).problems[0].text


def test_a_row_twice_is_found(finished):
    forge(finished, 1, lambda table: table.take(pa.array([0, 1, 1, 3])))
    assert look(finished).rejected == {1}


def test_a_change_that_keeps_rows_and_counts_is_only_seen_by_the_bytes(finished):
    forge(finished, 1, lambda table: with_column(table, "stop_reason", ["x"] * 4))
    assert look(finished).problems == ()
    flip(finished / record(1), 0)
    assert look(finished).rejected == {1}


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("finish_reason", ["stop", "error", "done", "stop"]),
        ("finish_reason", ["stop", "error", None, "stop"]),
        ("finish_reason", ["stop", "error", "error", "stop"]),
        ("error_code", [None, "null_prompt", "null_prompt", None]),
        ("error_code", [None, "what", None, None]),
        ("error_code", [None, None, None, None]),
    ],
)
def test_endings_that_there_are_not_are_found(finished, column, values):
    forge(finished, 1, lambda table: with_column(table, column, values), recounts=False)

    text = look(finished).problems[0].text
    assert "1 rows whose finish_reason and error_code do not fit together" in text


def test_columns_that_are_not_the_jobs_are_found(finished):
    forge(finished, 1, lambda table: table.drop_columns(["seed"]))
    assert "its columns are" in look(finished).problems[0].text


def test_a_part_of_too_few_rows_is_found(finished):
    forge(finished, 1, lambda table: table.slice(0, 3))
    assert "it has 3 rows, not 4" in look(finished).problems[0].text


def test_files_that_readers_take_for_parts_are_told_of(finished):
    shutil.copyfile(finished / part(0), finished / "copy.parquet")
    shutil.copyfile(finished / part(0), finished / part(3))
    (finished / "_notes.parquet").write_bytes(b"")
    (finished / "notes.txt").write_bytes(b"")

    found = look(finished)

    assert [(p.name, p.unit) for p in found.problems] == [("copy.parquet", None), (part(3), None)]
    assert (found.parts, found.exit_code) == (3, 6)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"fingerprint": "f" * 64}, "it is not about this job"),
        ({"part_bytes": {}}, f"its sizes of {part(0)}, {part(1)}, {part(2)} are not those"),
        ({"part_bytes": None}, f"its sizes of {part(0)}, {part(1)}, {part(2)} are not those"),
        ({"rows": 8}, "it says 8 rows, the job has 9"),
    ],
)
def test_a_mark_that_is_wrong_is_found(finished, change, text):
    change_json(finished / "_SUCCESS", **change)

    (problem,) = look(finished).problems

    assert (problem.name, problem.unit) == ("_SUCCESS", None)
    assert text in problem.text


def test_a_mark_of_too_many_parts_is_found(finished):
    sizes = json.loads((finished / "_SUCCESS").read_text())["part_bytes"]
    change_json(finished / "_SUCCESS", part_bytes=sizes | {part(3): 1})
    assert f"its sizes of {part(3)} are not" in look(finished).problems[0].text


def test_a_mark_that_does_not_read_is_found(finished):
    (finished / "_SUCCESS").write_bytes(b"")
    assert "does not read as what a finished job writes" in look(finished).problems[0].text


def test_a_mark_of_a_job_that_is_not_finished_is_found(finished):
    (finished / part(1)).unlink()
    (finished / record(1)).unlink()

    found = look(finished)

    assert [p.name for p in found.problems] == ["_SUCCESS"]
    assert f"{part(1)} not committed" in found.problems[0].text
    assert found.rejected == frozenset()


def test_a_mark_that_is_missing_is_told_of_once_all_is_committed(finished):
    (finished / "_SUCCESS").unlink()

    assert [(p.name, p.unit) for p in look(finished).problems] == [("_SUCCESS", None)]

    (finished / part(1)).unlink()
    (finished / record(1)).unlink()
    found = look(finished)
    assert (found.problems, found.parts, found.rows) == ((), 2, 5)


def test_a_part_that_cannot_be_read_is_told_of_and_never_rejected(finished):
    path = finished / part(1)
    path.unlink()
    path.symlink_to(path)

    found = look(finished)

    assert [(p.name, p.unit) for p in found.problems] == [(part(1), None)]
    assert "cannot be read: " in found.problems[0].text
    assert os.strerror(errno.ELOOP) in found.problems[0].text


def test_a_disk_that_fails_in_the_middle_is_told_of(finished):
    class BadDisk(io.FileIO):
        def readinto(self, buffer, /) -> int | None:
            if self.tell() > 100:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().readinto(memoryview(buffer)[:50])

    class BadStore(LocalStore):
        def open(self, name: str):
            if name != part(1):
                return super().open(name)
            return io.BufferedReader(BadDisk(self.path / name), buffer_size=50)

    found = verify(BadStore(finished, private="_jaxpaged"))

    assert [(p.name, p.unit) for p in found.problems] == [(part(1), None)]
    assert os.strerror(errno.EIO) in found.problems[0].text


@contextlib.contextmanager
def held_by_a_writer(out: pathlib.Path):
    with (out / "_jaxpaged" / "lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def test_what_a_writer_has_not_finished_is_no_problem(finished):
    (finished / "_SUCCESS").unlink()
    (finished / record(2)).unlink()
    with held_by_a_writer(finished):
        found = look(finished)
        assert (found.problems, found.parts, found.is_running) == ((), 2, True)

        flip(finished / part(0), 40)
        assert look(finished).rejected == {0}

    assert len(look(finished).problems) == 2


def test_a_unit_that_is_committed_anew_meanwhile_is_right(finished, tmp_path):
    """A repair replaces part and record between the listing and the reading."""
    spare = tmp_path / "spare"
    shutil.copytree(finished, spare)
    forge(spare, 1, lambda table: with_column(table, "seed", [1, 2, 3, 4]))

    class Repaired(LocalStore):
        def open(self, name: str):
            # The record was read, the part is not yet.
            if name == part(1):
                shutil.copyfile(spare / name, self.path / name)
                for other in (record(1), "_SUCCESS"):
                    shutil.copyfile(spare / other, self.path / other)
            return super().open(name)

    assert verify(Repaired(finished, private="_jaxpaged")).problems == ()


def test_an_empty_job_is_right(write_rows, make_spec, engine, out):
    write_rows(q=pa.array([], pa.string()))
    run_job(make_spec(input={"prompt_column": "q"}), engine=engine())

    found = look(out)

    assert (found.problems, found.parts, found.rows, found.is_finished) == ((), 1, 0, True)


def test_problems_are_shown_without_control_characters():
    text = io.StringIO()
    odd = Problem(name="part\x1b[2J.parquet", text="is\nodd \x07", unit=1)
    found = Verification(
        problems=(odd,), parts=2, rows=5, units=3, is_finished=False, is_running=False
    )

    verify_table.show(found, rich.console.Console(file=text, width=60))

    assert text.getvalue() == (
        "part\ufffd[2J.parquet: is odd \ufffd\n"
        "2 of 3 parts are right, with 5 rows; the job is not finished; 1 problems\n"
    )


class Retried:
    """A job of one row a part, of which the rows that were cut are redone."""

    def __init__(self, make_spec, write_rows, engine, out):
        write_rows(q=["a", "long", "b", "longer"])
        sections = {
            "input": {"prompt_column": "q"},
            "output": {"rows_per_part": 1},
            "sampling": {"max_tokens": 3},
        }
        run_job(make_spec(**sections), engine=engine(answer=lambda text: text))
        self._engine = engine
        self._out = out

    def retry(self, **options) -> None:
        retry_job(
            str(self._out),
            where="finish_reason = 'length'",
            settings=["sampling.max_tokens=9"],
            # So that the second part is later than the first.
            engine=self._engine(
                answer=lambda text: text, num_steps=lambda request: 1 + 5 * request.request_id
            ),
            **options,
        )

    def stop_before_the_second(self) -> None:
        """Ends the retry when one of its two parts is committed."""
        with pytest.raises(JobInterrupted):
            self.retry(should_stop=(self._out / record(1, 1)).exists)


@pytest.fixture
def retried(make_spec, write_rows, engine, out) -> Retried:
    return Retried(make_spec, write_rows, engine, out)


def test_a_retry_is_right_when_it_is_finished_and_while_it_is_not(retried, out):
    retried.stop_before_the_second()
    found = look(out)
    assert (found.problems, found.parts, found.is_finished) == ((), 4, False)

    retried.retry()
    found = look(out)
    assert (found.problems, found.parts, found.is_finished) == ((), 4, True)


def test_a_part_of_a_retry_that_was_not_committed_is_told_of_and_kept(retried, out):
    retried.stop_before_the_second()
    (out / record(1, 1)).unlink()

    found = look(out)

    assert [(p.name, p.unit) for p in found.problems] == [(part(1), None)]
    assert "was made by revision 1, a retry, and has no commit record" in found.problems[0].text
    with held_by_a_writer(out):
        assert look(out).problems == ()

    retried.retry()
    assert look(out).problems == ()


def test_a_part_of_before_a_retry_is_found(retried, out):
    before = (out / part(1)).read_bytes()
    retried.retry()
    (out / part(1)).write_bytes(before)

    (problem,) = look(out).problems

    assert problem.unit == 1
    assert "it says it is unit 1, rows 1 to 2, revision 0" in problem.text


def test_a_record_of_a_retry_that_never_had_the_unit_is_found(retried, out):
    retried.retry()
    shutil.copyfile(out / record(1, 1), out / record(0, 1))
    change_json(out / record(0, 1), unit=0, start=0, stop=1)

    (problem,) = look(out).problems

    assert problem.unit == 0
    assert "of a revision that the job does not have" in problem.text


def test_an_extended_job_is_right(write_rows, make_spec, engine, out):
    write_rows("b.parquet", q=["b0", "b1", "b2"])
    sections = {"input": {"prompt_column": "q"}, "output": {"rows_per_part": 2}}
    run_job(make_spec(**sections), engine=engine())
    # Its name sorts in front, its rows come behind.
    write_rows("a.parquet", q=["a0", "a1", "a2"])
    run_job(make_spec(**sections), engine=engine(), options=RunOptions(extends=True))

    found = look(out)

    assert (found.problems, found.parts, found.rows, found.is_finished) == ((), 4, 6, True)
    swapped = (out / part(1)).read_bytes()
    (out / part(1)).write_bytes((out / part(3)).read_bytes())
    (out / part(3)).write_bytes(swapped)
    assert look(out).rejected == {1, 3}


def test_whatever_is_rejected_is_mended_by_a_repair(finished, run):
    flip(finished / part(0), 40)
    (finished / part(1)).unlink()
    (finished / record(2)).write_bytes(b"")
    assert look(finished).rejected == {0, 1, 2}

    run(finished, options=RunOptions(repairs=True))

    assert look(finished).problems == ()
