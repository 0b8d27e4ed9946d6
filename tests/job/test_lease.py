"""Writers of an object store, which nothing but their attempts keeps apart: killed, asleep, late.

On a bucket in memory, so that something can happen before any change of it.
"""

import contextlib
import datetime
import itertools
import os
import random
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from _pytest.mark import ParameterSet
from job_output import Watch
from memory_bucket import MemoryBucket
from stop_after import NEVER, StopAfter

from jaxpaged.errors import OutputConflictError
from jaxpaged.job.interrupt import JobInterrupted
from jaxpaged.job.look.status import status
from jaxpaged.job.look.verify import verify
from jaxpaged.job.output.attempt import LEASE_SECONDS
from jaxpaged.job.planned_job import RunOptions, open_output
from jaxpaged.job.retry import retry_job
from jaxpaged.job.runner import run_job
from jaxpaged.job.spec import JobSpec

OUT = "bucket/out"
URL = f"s3://{OUT}"

Step = Callable[[str], object]


def slow(command: str) -> ParameterSet:
    """A command whose steps are much like those of the others."""
    return pytest.param(command, marks=pytest.mark.slow)


class Killed(BaseException):
    """The process is gone."""


def at(number: int, act: Callable[[], object]) -> Step:
    """Does something before the change of this number, counted from 0."""
    numbers = itertools.count()
    return lambda name: act() if next(numbers) == number else None


def killed_at(number: int) -> Step:
    """Ends the process there: no change follows, whatever it makes of its end."""
    numbers = itertools.count()

    def step(name: str) -> None:
        if next(numbers) >= number:
            raise Killed

    return step


class Scene:
    """A command on a bucket, which can be done again and again.

    Args:
        bucket: As the command finds it.
        spec: The job.
        command: Does it.

    Attributes:
        after: The rows that it leaves.
        changes: The names that it changes, in order.
    """

    def __init__(self, bucket: MemoryBucket, spec: JobSpec, command: Callable[[], object]) -> None:
        self.bucket = bucket
        self.spec = spec
        self.changes: list[str] = []
        self._command = command
        self._found, self._before = bucket.copied(), bucket.rows(OUT)
        self.after: list[dict] = []
        self.do(self.changes.append)
        self.after = bucket.rows(OUT)
        self.check_finished("undisturbed")

    def begin(self) -> None:
        """Makes the bucket what the command finds."""
        self.bucket.objects.clear()
        self.bucket.objects.update(self._found)
        self._found = self.bucket.copied()

    def do(self, step: Step = lambda name: None) -> None:
        """The command, with what happens before each change."""

        def looking(name: str) -> None:
            self.look()
            step(name)

        outer, self.bucket.before_change = self.bucket.before_change, looking
        try:
            self._command()
        finally:
            self.bucket.before_change = outer

    def do_late(self) -> None:
        """The command of another process, once every other writer was silent for too long."""
        self.bucket.age(LEASE_SECONDS)
        self.do()

    def names(self, folder: str) -> list[str]:
        """What lies in a folder of this name."""
        return [path for path in self.bucket.objects if folder in path]

    def look(self) -> None:
        """A reader sees no row twice, none gone, each as it was before or as it is after."""
        rows = self.bucket.rows(OUT)
        addresses = {str(row["row"]) for row in rows}
        assert len(addresses) == len(rows)
        assert addresses >= {str(row["row"]) for row in self._before}
        assert not self.after or all(row in self._before or row in self.after for row in rows)

    def check_finished(self, hint: str) -> None:
        store = open_output(self.spec)
        assert verify(store).problems == (), hint
        # A reader goes by its own clock.
        later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=LEASE_SECONDS)
        assert status(store, later).state == "finished", hint
        assert self.bucket.rows(OUT) == self.after, hint


@pytest.fixture
def bucket() -> Iterator[MemoryBucket]:
    bucket = MemoryBucket()
    with bucket.connected():
        yield bucket


@pytest.fixture
def spec(write_rows, make_spec) -> JobSpec:
    """Of seven rows in two parts; one is faulty, two are alike, one of each part is cut."""
    write_rows("a.parquet", q=["a", "cccc", None, "a", "b", "dddd", "c"])
    return make_spec(
        input={"prompt_column": "q"},
        output={"path": URL, "rows_per_part": 4, "journal_interval": 0.0},
        sampling={"max_tokens": 4},
        engine={"max_num_seqs": 2},
    )


@pytest.fixture
def run(spec, engine) -> Callable[..., object]:
    def run(**options) -> object:
        double = engine(max_num_seqs=2, num_steps=lambda request: 1 + request.request_id % 2)
        return run_job(spec, engine=double, **options)

    return run


@pytest.fixture
def set_scene(bucket, spec, run, engine, write_rows) -> Callable[[str], Scene]:
    def set_scene(command: str) -> Scene:
        if command == "run":
            return Scene(bucket, spec, run)
        run()
        if command == "extend":
            write_rows("b.parquet", q=["f", "gggg", "g"])
            return Scene(bucket, spec, lambda: run(options=RunOptions(extends=True)))

        def retry() -> object:
            settings = ["sampling.max_tokens=9"]
            double = engine(max_num_seqs=2)
            return retry_job(
                URL, where="finish_reason = 'length'", settings=settings, engine=double
            )

        return Scene(bucket, spec, retry)

    return set_scene


def test_a_second_writer_is_told_who_the_first_one_is(bucket, run, engine, spec):
    told: list[str] = []

    def look() -> None:
        double = engine()
        with pytest.raises(OutputConflictError) as caught:
            run_job(spec, engine=double)
        assert caught.value.exit_code == 6
        assert double.requests == []
        told.append(str(caught.value))

    report = run(should_stop=StopAfter(NEVER, look))

    assert (report.state, report.output.rows) == ("finished", 7)
    assert len(told) >= 3
    for message in told:
        assert message.startswith(
            f"output.path: another process is writing to {URL} (attempt 1 on host "
            f"{socket.gethostname()}, process {os.getpid()}, since 20"
        )
        assert "or, if it was killed, for 60 s after its last sign of life" in message
    attempts = {path.rpartition("/")[2] for path in bucket.objects if "/attempts/" in path}
    assert attempts == {"000001.beat", "000001.end", "000001.json", "clock"}


def replayed(
    scene: Scene, disturb: Callable[[int], Step], *, folder: str = ""
) -> Iterator[tuple[str, BaseException | None]]:
    """Each change of a command, in a folder, and how the command ends if disturbed before it."""
    for number, name in enumerate(scene.changes):
        if folder not in name:
            continue
        scene.begin()
        ended: BaseException | None = None
        try:
            scene.do(disturb(number))
        except (Killed, OutputConflictError) as error:
            ended = error
        scene.look()
        yield name, ended


@pytest.mark.parametrize("command", ["run", slow("extend"), slow("retry")])
def test_a_kill_at_any_step_costs_a_wait(set_scene, command):
    scene = set_scene(command)
    waited, adopted = [], []

    for name, ended in replayed(scene, killed_at):
        assert isinstance(ended, Killed)
        try:
            scene.do()
        except OutputConflictError:
            waited.append(name)
            scene.do_late()
        scene.check_finished(f"killed before {name}")
        assert scene.names("/journal/") == []
        records = [scene.bucket.objects[path].getvalue() for path in scene.names("/commits/")]
        adopted += [name for record in records if b'"adopted_by": null' not in record]

    # A part without a record.
    assert adopted == [name for name in scene.changes if "/commits/" in name]
    # From its first sign of life on, until the job is finished.
    began = next(i for i, name in enumerate(scene.changes) if "/attempts/" in name)
    is_done = max(i for i, name in enumerate(scene.changes) if name.endswith("/_SUCCESS"))
    assert waited == scene.changes[began + 1 : is_done + 1]


@pytest.mark.parametrize("command", ["run", slow("extend")])
def test_a_writer_that_slept_before_any_step_spoils_nothing(set_scene, command):
    scene = set_scene(command)
    refused = []

    for name, ended in replayed(scene, lambda number: at(number, scene.do_late)):
        scene.check_finished(f"asleep before {name}")
        if ended is not None:
            assert isinstance(ended, OutputConflictError)
            refused.append(name)

    # It never takes what another one made for its own.
    ours = [name for name in scene.changes if "/commits/" in name or "/part-" in name]
    assert set(ours) <= set(refused)


def test_a_writer_that_was_replaced_commits_nothing_more(set_scene, run):
    scene, commits, num_refused = set_scene("run"), 0, 0

    def replace() -> None:
        """By one that ends before it commits anything."""
        nonlocal commits
        scene.bucket.age(LEASE_SECONDS)
        with contextlib.suppress(JobInterrupted):
            run(should_stop=StopAfter(0))
        commits = len(scene.names("/commits/"))

    # Inside a commit it would be too late to ask.
    for name, ended in replayed(scene, lambda number: at(number, replace), folder="/journal/"):
        if commits < 2:
            num_refused += 1
            assert "and attempt 2 on host" in str(ended), f"asleep before {name}"
            assert "took over; it continues this job" in str(ended)
            assert len(scene.names("/commits/")) == commits
    assert num_refused >= 3


@pytest.mark.slow
def test_a_late_retry_replaces_one_part_at_most(set_scene, run):
    # That one is replaced by its like, without a condition; its record is that of the other's.
    scene = set_scene("retry")

    for name, _ in replayed(scene, lambda number: at(number, scene.do_late)):
        assert scene.bucket.rows(OUT) == scene.after, f"asleep before {name}"
        problems = verify(open_output(scene.spec)).problems
        assert len(problems) <= 1
        if problems:
            scene.bucket.age(LEASE_SECONDS)
            run(options=RunOptions(repairs=True))
            scene.do()
        scene.check_finished(f"asleep before {name}")


@pytest.mark.parametrize("command", ["run", slow("extend")])
def test_kills_and_naps_upon_each_other_spoil_nothing(set_scene, command):
    scene, pick = set_scene(command), random.Random(command)
    events: list[str] = []

    def live(depth: int) -> None:
        """A process that is killed, or sleeps while another one lives."""
        number = pick.randrange(len(scene.changes))
        is_killed = not depth or pick.random() < 0.3
        events.append(f"{'killed' if is_killed else 'asleep'} at {number}")
        scene.bucket.age(LEASE_SECONDS)
        with contextlib.suppress(Killed, OutputConflictError):
            scene.do(killed_at(number) if is_killed else at(number, lambda: live(depth - 1)))

    for _ in range(8):
        scene.begin()
        events.clear()
        for _ in range(2):
            live(3)
        scene.look()
        while True:
            with contextlib.suppress(OutputConflictError):
                scene.do_late()
                break
        scene.check_finished("; ".join(events))


def test_writers_that_take_each_other_for_dead_spoil_nothing(set_scene):
    scene = set_scene("run")

    def write(number: int) -> str:
        try:
            scene.do(lambda name: scene.bucket.age(LEASE_SECONDS))
        except OutputConflictError:
            return "refused"
        return "finished"

    for _ in range(4):
        scene.begin()
        with ThreadPoolExecutor(3) as threads:
            ends = list(threads.map(write, range(3)))
        scene.bucket.before_change = None
        scene.look()
        if "finished" not in ends:
            scene.do_late()
        scene.check_finished(str(ends))


@pytest.mark.parametrize("conditions", ["ignored", "unsupported"])
def test_a_store_without_conditions_is_told_of_and_written_to(bucket, set_scene, run, conditions):
    bucket.conditions = conditions
    scene, watch = set_scene("run"), Watch()
    record = next(i for i, name in enumerate(scene.changes) if "/commits/000001" in name)
    scene.begin()
    with pytest.raises(Killed):
        scene.do(killed_at(record))
    bucket.age(LEASE_SECONDS)

    run(progress=watch)

    assert watch.notes[0].startswith(
        f"{URL}: this store overwrites objects even when asked not to; two jobs that begin to write"
    )
    assert watch.notes[1] == "part-000001.parquet was whole, and is committed now"
    scene.check_finished("adopted")
