"""Disks, inputs, models and engines that fail: one message, nothing half-visible, no row lost."""

import errno
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from failing_disk import ALL, NEEDS_SPACE, FailingDisk, NumberedDisk
from failing_engine import FailingEngine
from job_scene import make_scene
from nursery import Nursery
from outside_reader import OutsideReader, table
from tiny import write_tiny_llama

from jaxpaged.errors import ConfigError, InputSchemaError, JaxPagedError, StorageError
from jaxpaged.job.interrupt import JobInterrupted
from jaxpaged.job.look import verify
from jaxpaged.job.output import journal_frame
from jaxpaged.job.planned_job import RunOptions, open_output
from jaxpaged.job.runner import run_job
from jaxpaged.job.spec import JobSpec

TESTS = pathlib.Path(__file__).resolve().parents[1]


@pytest.fixture
def spec(write_rows, make_spec) -> JobSpec:
    """A job of two units, whose rows take one step each."""
    write_rows("a.parquet", id=[0, 1, 2], q=["a", None, "c"])
    write_rows("b.parquet", id=[3, 4, 5], q=["a", "a", "f"])
    return make_spec(
        input={"prompt_column": "q"},
        output={"rows_per_part": 4, "journal_interval": 0.0},
        engine={"max_num_seqs": 2},
    )


@pytest.fixture
def make_engine(tokenizer) -> Callable[..., FailingEngine]:
    def make(**options: int) -> FailingEngine:
        return FailingEngine(tokenizer, max_num_seqs=2, **options)

    return make


@pytest.fixture
def expected(spec, make_engine, tmp_path) -> pa.Table:
    """What the job comes to where nothing fails."""
    other = spec.output.model_copy(update={"path": str(tmp_path / "whole")})
    run_job(spec.model_copy(update={"output": other}), engine=make_engine())
    return table(tmp_path / "whole")


def num_journaled(out: pathlib.Path) -> int:
    """Rows that are in the journal and in no part."""
    count = 0
    for log in (out / "_jaxpaged" / "journal").glob("*"):
        if not (out / f"part-{log.name}.parquet").exists():
            count += max(0, len(list(journal_frame.read(log.read_bytes()))) - 1)
    return count


def check_goes_on(
    spec: JobSpec, engine: FailingEngine, reader: OutsideReader, expected: pa.Table
) -> None:
    """A rerun takes over all that the journal has, and comes to what is expected."""
    out = pathlib.Path(spec.output.path)
    reader.look()
    journaled = num_journaled(out)

    report = run_job(spec, engine=engine)

    if report.state == "finished":
        assert report.run.rows_resumed == journaled
    reader.look()
    assert table(out).equals(expected)
    assert not verify.verify(open_output(spec)).problems
    private = out / "_jaxpaged"
    assert not list((private / "journal").glob("*"))
    # A failure behind the very end may leave the attempt's own last words unfinished.
    assert all("-attempts-" in path.name for path in (private / "tmp").iterdir())


def error_of(spec: JobSpec, engine: FailingEngine, disk: NumberedDisk) -> JaxPagedError | None:
    """What a run on a disk fails with."""
    try:
        run_job(spec, engine=engine, options=RunOptions(disk=disk))
    except JaxPagedError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("code", "operations", "lasts"),
    [
        pytest.param(errno.ENOSPC, NEEDS_SPACE, True, id="full"),
        pytest.param(errno.EROFS, ALL - {"sync"}, True, id="read-only", marks=pytest.mark.slow),
        pytest.param(errno.EIO, {"sync"}, False, id="flush"),
        pytest.param(errno.EIO, {"rename", "link"}, False, id="rename"),
    ],
)
def test_a_disk_that_fails_at_any_step_costs_no_row(
    spec, make_engine, expected, out, code, operations, lasts
):
    disk = NumberedDisk()
    run_job(spec, engine=make_engine(), options=RunOptions(disk=disk))
    steps = [(at, step) for at, step in enumerate(disk.steps, 1) if step.split()[0] in operations]
    assert len(steps) > 5
    # Where not even the folder can be made, the job's place is wrong.
    first = disk.steps.index("make_folder _jaxpaged/attempts") + 1

    for at, step in steps:
        shutil.rmtree(out)
        disk = FailingDisk(at, code, operations=operations, lasts=lasts)
        reader = OutsideReader(out, [expected])
        error = error_of(spec, make_engine(), disk)

        assert disk.num_failures, step
        assert isinstance(error, ConfigError if at < first else StorageError | None), step
        if error is not None:
            assert error.exit_code == (2 if at < first else 1)
            assert re.fullmatch(rf"(output.path: )?cannot write to {out}.*", str(error)), step
            assert os.strerror(code) in str(error), step
        else:
            # Nothing was left to write but how the attempt ended.
            assert (out / "_SUCCESS").exists(), step
        check_goes_on(spec, make_engine(), reader, expected)


@pytest.mark.parametrize("command", [pytest.param("extend", marks=pytest.mark.slow), "retry"])
def test_a_disk_that_fills_up_under_an_extension_or_a_retry(tmp_path, model, command):
    scene = make_scene(tmp_path, model, command, "machine")
    ends = range(scene.steps.index("rename out/_SUCCESS") + 1)
    steps = [at for at in ends if scene.steps[at].split()[0] in NEEDS_SPACE]
    assert len(steps) > 8

    # The first step makes a folder that is there already.
    for at in steps[1:]:
        reader = scene.begin()
        with pytest.raises(StorageError, match=rf"cannot write to {scene.out}.*: No space left"):
            scene.complete(FailingDisk(at + 1, operations=NEEDS_SPACE))
        reader.look()

        scene.complete()

        reader.look()
        scene.check_finished()


@pytest.mark.parametrize(
    ("name", "num_visible"),
    [
        ("tmp/part-000000.parquet.tmp", 0),
        ("journal/000000", 0),
        ("tmp/part-000001.parquet.tmp", 4),
    ],
)
def test_a_disk_that_is_really_full(spec, make_engine, expected, out, name, num_visible):
    path = out / "_jaxpaged" / name
    reader = OutsideReader(out, [expected])

    def fill() -> bool:
        path.parent.mkdir(exist_ok=True)
        if not path.is_symlink():
            path.unlink(missing_ok=True)
            path.symlink_to("/dev/full")
        return False

    with pytest.raises(
        StorageError, match=r"cannot write to .*No space left on device; "
    ) as caught:
        run_job(spec, engine=make_engine(), should_stop=fill)

    assert caught.value.exit_code == 1
    assert reader.look() == num_visible
    if path.is_symlink():
        path.unlink()
    check_goes_on(spec, make_engine(), reader, expected)


LIMITED = """
import json, resource, sys
sys.path.insert(0, sys.argv[2])
from failing_disk import NumberedDisk
from killable_job import complete, scripted
from jaxpaged.errors import JaxPagedError

order = json.loads(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    complete(order, scripted(order["job"]), NumberedDisk())
except JaxPagedError as error:
    sys.stderr.write(str(error))
    sys.exit(error.exit_code)
"""


def test_a_part_that_may_not_grow(write_rows, make_spec, make_engine, tmp_path, out):
    """The kernel refuses what Arrow writes, past a limit on the size of files."""
    noise = np.random.default_rng(0).integers(97, 123, size=(8, 100_000), dtype="u1")
    texts = ["short"] * 4 + [bytes(row).decode() for row in noise[4:]]
    write_rows(q=["a"] * 8, text=texts)
    job = make_spec(input={"prompt_column": "q"}, output={"rows_per_part": 4})
    order = {"command": "run", "job": job.model_dump(mode="json", exclude_none=True)}
    command = [sys.executable, "-c", LIMITED, json.dumps(order), str(TESTS)]

    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 1, done.stderr
    assert re.fullmatch(
        rf"cannot write to {out}/\S+part-000001\S*: .*File too large; finished parts are kept, .*",
        done.stderr,
    )
    assert table(out)["text"].to_pylist() == ["short"] * 4
    assert num_journaled(out) == 4
    report = run_job(job, engine=make_engine())
    assert (report.run.parts_kept, report.run.rows_resumed, report.run.rows) == (1, 4, 0)
    assert table(out)["text"].to_pylist() == texts


NOBODY = """
import json, os, sys
sys.path.insert(0, sys.argv[2])
from failing_disk import NumberedDisk
from killable_job import complete, scripted
from jaxpaged.errors import JaxPagedError
from jaxpaged.job import planned_job
from jaxpaged.job.spec import JobSpec

order = json.loads(sys.argv[1])
engine = scripted(order["job"])
planned_job.plan(JobSpec.from_dict(order["job"]))
if os.geteuid() == 0: os.setuid(65534)
try:
    complete(order, engine, NumberedDisk())
except JaxPagedError as error:
    sys.stderr.write(str(error))
    sys.exit(error.exit_code)
"""


class StopAfter:
    """Says stop once it was asked so often."""

    def __init__(self, num_steps: int) -> None:
        self.left = num_steps

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


def test_a_folder_that_became_read_only():
    # Not where pytest keeps its own, which it takes away from nobody now and then.
    with tempfile.TemporaryDirectory() as name:
        place = pathlib.Path(name)
        model = write_tiny_llama(place / "model")
        scene = make_scene(place, model, "run")
        reader = scene.begin()
        with pytest.raises(StorageError):
            scene.complete(FailingDisk(scene.steps.index("append journal/000001") + 1))
        assert reader.look() == 4
        for path in (place, *model.iterdir()):
            path.chmod(0o755)
        folders = [scene.out, *(path for path in scene.out.rglob("*") if path.is_dir())]
        for folder in folders:
            folder.chmod(0o555)
        command = [sys.executable, "-c", NOBODY, json.dumps(scene.order), str(TESTS)]

        # As nobody, because root may write everywhere.
        done = subprocess.run(command, capture_output=True, text=True, check=False)

        assert done.stderr == f"output.path: cannot write to {scene.out}: Permission denied"
        assert done.returncode == 2
        for folder in folders:
            folder.chmod(0o755)
        scene.complete()
        reader.look()
        scene.check_finished()


def test_an_adopted_part_is_on_the_disk_before_its_record(spec, make_engine, expected, out):
    """The run that made it may have ended before it flushed the part, or its name."""
    run_job(spec, engine=make_engine())
    (out / "_SUCCESS").unlink()
    (out / "_jaxpaged" / "commits" / "000001-r0.json").unlink()
    disk = NumberedDisk()

    report = run_job(spec, engine=make_engine(), options=RunOptions(disk=disk))

    assert report.run.parts_adopted == 1
    steps = disk.steps[: disk.steps.index("link commits/000001-r0.json")]
    assert "sync out/part-000001.parquet" in steps
    assert "sync out" in [re.sub(r"sync \S+/out", "sync out", step) for step in steps]
    assert table(out).equals(expected)


class Damage:
    """Changes a file once the first part is there."""

    def __init__(self, out: pathlib.Path, change: Callable[[], object]) -> None:
        self._out = out
        self._change = change
        self.is_done = False

    def __call__(self) -> bool:
        if not self.is_done and list(self._out.glob("*.parquet")):
            self._change()
            self.is_done = True
        return False


def truncate(path: pathlib.Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def replace(path: pathlib.Path) -> None:
    """Other rows, in as many row groups."""
    rows = pq.read_table(path)
    pq.write_table(rows.slice(1).select(["id", "q"]), path, row_group_size=4)


def overwrite(path: pathlib.Path) -> None:
    """As many bytes, some of them others."""
    data = bytearray(path.read_bytes())
    data[200:260] = bytes(60)
    path.write_bytes(data)


@pytest.mark.parametrize("change", [truncate, replace, overwrite, pathlib.Path.unlink])
def test_an_input_file_that_changes_under_a_running_job(
    write_rows, make_spec, make_engine, out, change
):
    write_rows("a.parquet", id=range(8), q=["a"] * 8)
    path = write_rows("b.parquet", id=range(60), q=["b"] * 60, row_group_size=4)
    spec = make_spec(
        input={"prompt_column": "q"},
        output={"rows_per_part": 8, "journal_interval": 0.0},
        engine={"max_num_seqs": 2},
    )
    data = path.read_bytes()
    damage = Damage(out, lambda: change(path))

    with pytest.raises(InputSchemaError, match=r"b\.parquet") as caught:
        run_job(spec, engine=make_engine(), should_stop=damage)

    assert damage.is_done
    assert caught.value.exit_code == 2
    assert str(caught.value).count("\n") == 0
    assert table(out)["q"].to_pylist() == ["a"] * 8, "nothing of what changed is committed"
    ended = json.loads((out / "_jaxpaged" / "attempts" / "000001.end").read_text())
    assert (ended["state"], ended["message"]) == ("failed", str(caught.value))
    with pytest.raises(JaxPagedError, match=r"b\.parquet"):
        run_job(spec, engine=make_engine())
    path.write_bytes(data)
    run_job(spec, engine=make_engine())
    assert table(out)["q"].to_pylist() == ["a"] * 8 + ["b"] * 60
    assert not verify.verify(open_output(spec)).problems


def contents(folder: pathlib.Path) -> dict[pathlib.Path, tuple[bytes, int]]:
    """Bytes and modification time of every file."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_model_file_that_is_gone_when_a_job_goes_on(
    spec, make_engine, expected, out, tmp_path, name
):
    model = write_tiny_llama(tmp_path / "model")
    spec = spec.model_copy(update={"model": str(model)})
    with pytest.raises(JobInterrupted):
        run_job(spec, engine=make_engine(), should_stop=StopAfter(2))
    before = contents(out)
    (model / name).rename(tmp_path / name)

    with pytest.raises(ConfigError, match=rf"{model}.*{name}") as caught:
        run_job(spec, engine=make_engine())

    assert caught.value.exit_code == 2
    assert str(caught.value).count("\n") == 0
    assert contents(out) == before
    (tmp_path / name).rename(model / name)
    check_goes_on(spec, make_engine(), OutsideReader(out, [expected]), expected)


@pytest.mark.parametrize(("fails_at", "num_visible"), [(1, 0), (2, 0), (3, 4)])
def test_an_engine_that_breaks_commits_nothing_of_the_unit_in_flight(
    spec, make_engine, expected, out, fails_at, num_visible
):
    reader = OutsideReader(out, [expected])
    broken = make_engine(fails_at=fails_at)

    with pytest.raises(RuntimeError, match="the device is gone"):
        run_job(spec, engine=broken)

    assert reader.look() == num_visible
    assert not broken.has_work()
    private = out / "_jaxpaged"
    ended = json.loads((private / "attempts" / "000001.end").read_text())
    assert (ended["state"], ended["message"]) == ("failed", "the device is gone")
    assert json.loads((private / "report.json").read_text())["state"] == "failed"
    assert len(broken.finished) == num_journaled(out) + (3 if num_visible else 0)
    engine = make_engine()
    check_goes_on(spec, engine, reader, expected)
    # Row 1 has no prompt.
    assert engine.begun == {0, 2, 3, 4, 5} - broken.finished


@pytest.fixture(scope="module")
def nursery(tmp_path_factory) -> Iterator[Nursery]:
    command = [sys.executable, str(TESTS / "killable_job.py")]
    with Nursery(command, tmp_path_factory.mktemp("nursery") / "log") as nursery:
        yield nursery


def wait_until(is_so: Callable[[], object], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.005)


def command_line(*arguments: object) -> subprocess.Popen[str]:
    """The command line in a process of its own."""
    command = [sys.executable, "-c", "from jaxpaged.cli import main; main()"]
    return subprocess.Popen(
        [*command, *map(str, arguments)],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_a_second_process_is_told_of_the_first(write_rows, make_spec, nursery, out, tmp_path):
    write_rows(q=["a"] * 200)
    spec = make_spec(input={"prompt_column": "q"}, output={"rows_per_part": 10})
    job = spec.model_dump(mode="json", exclude_none=True)
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    first = nursery.start({"command": "run", "job": job, "pause": 0.1})
    wait_until(lambda: list(out.glob("*.parquet")))

    second = command_line("run", tmp_path / "job.yaml")
    stderr = second.communicate(timeout=60)[1]

    assert second.returncode == 6, stderr
    assert re.search(
        rf"^error: output.path: another process is writing to {out} \(attempt 1 on host "
        rf"{re.escape(socket.gethostname())}, process {first.pid}, since [\dT:+-]+\); wait until",
        stderr,
        re.MULTILINE,
    ), stderr
    assert not first.has_ended(), "nor was the first one disturbed"
    # A killed writer is in nobody's way.
    first.kill()
    assert first.wait() == -signal.SIGKILL
    assert nursery.run({"command": "run", "job": job}) == 0
    assert table(out)["completion"].to_pylist() == ["[a]"] * 200


def journaled_bytes(out: pathlib.Path) -> int:
    return sum(path.stat().st_size for path in (out / "_jaxpaged" / "journal").glob("*"))


def test_signals_end_a_job_within_seconds_and_lose_no_row(write_rows, tmp_path, out, monkeypatch):
    write_rows(id=list(range(500)), q=[f"q{number % 9}" for number in range(500)])
    job = {
        "model": str(write_tiny_llama(tmp_path / "model", layers=1)),
        "input": {"path": str(tmp_path / "in"), "prompt_column": "q"},
        # One unit: all that a signal leaves is in the journal.
        "output": {"path": str(out), "journal_interval": 0.05},
        "sampling": {"max_tokens": 16, "ignore_eos": True},
        "engine": {"max_num_seqs": 2, "max_model_len": 32, "num_blocks": 16},
    }
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(job))
    # Only the first process compiles.
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "compiled"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

    def interrupted(*signals: signal.Signals) -> tuple[int, str]:
        """Exit code and last words of a run that gets signals as soon as it has new rows."""
        before = journaled_bytes(out)
        running = command_line("run", path)
        wait_until(lambda: journaled_bytes(out) > before + 2000 or running.poll() is not None)
        for number in signals:
            running.send_signal(number)
        started = time.monotonic()
        stderr = running.communicate(timeout=60)[1]
        assert time.monotonic() - started < 5
        assert num_journaled(out) > 0
        assert not list(out.glob("*.parquet"))
        assert "Traceback" not in stderr
        return running.returncode, stderr

    code, stderr = interrupted(signal.SIGINT)
    assert code == 130
    stopped = re.search(r"interrupted: stopped after (\d+) of 500 rows", stderr)
    assert stopped, stderr
    assert int(stopped[1]) == num_journaled(out)

    code, stderr = interrupted(signal.SIGTERM)
    assert code == 143
    stopped = re.search(r"interrupted: stopped after (\d+) of 500 rows", stderr)
    assert stopped, stderr
    assert int(stopped[1]) == num_journaled(out)

    code, _ = interrupted(signal.SIGTERM, signal.SIGTERM)
    assert code == 143

    journaled = num_journaled(out)
    last = command_line("run", path)
    stderr = last.communicate(timeout=120)[1]
    assert last.returncode == 0, stderr
    report = json.loads((out / "_jaxpaged" / "report.json").read_text())
    assert report["run"]["rows_resumed"] == journaled
    assert table(out)["id"].to_pylist() == list(range(500))
    assert set(table(out)["completion_tokens"].to_pylist()) == {16}
