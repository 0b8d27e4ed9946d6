"""SIGKILL at every step of the disk, and at random moments: what is seen, and how jobs go on."""

import functools
import json
import pathlib
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from failing_disk import ALL, HALVES
from failing_engine import FailingEngine
from job_scene import Scene, make_scene
from killable_job import complete
from nursery import Nursery

from jaxpaged.storage.disk import Disk

TESTS = pathlib.Path(__file__).resolve().parents[1]
CHAOS = TESTS.parent / "scripts" / "chaos_job.py"


@pytest.fixture(scope="module")
def nursery(tmp_path_factory) -> Iterator[Nursery]:
    command = [sys.executable, str(TESTS / "killable_job.py")]
    with Nursery(command, tmp_path_factory.mktemp("nursery") / "log") as nursery:
        yield nursery


@pytest.fixture
def set_scene(tmp_path, model) -> Callable[..., Scene]:
    return functools.partial(make_scene, tmp_path, model)


@pytest.mark.parametrize(
    ("command", "durability", "operations"),
    [
        ("run", "process", ALL),
        ("retry", "process", ALL),
        pytest.param("extend", "process", ALL, marks=pytest.mark.slow),
        # But for these, the steps are the same.
        ("run", "machine", {"sync"}),
        pytest.param("run", "machine", ALL, marks=pytest.mark.slow),
        pytest.param("extend", "machine", ALL, marks=pytest.mark.slow),
        pytest.param("retry", "machine", ALL, marks=pytest.mark.slow),
    ],
)
def test_a_kill_at_any_step_costs_nothing(set_scene, nursery, command, durability, operations):
    scene = set_scene(command, durability)
    steps = [(at, step) for at, step in enumerate(scene.steps, 1) if step.split()[0] in operations]
    assert len(steps) > 20

    for at, step in steps:
        for moment in ("before", "inside") if step.startswith(HALVES) else ("before",):
            reader = scene.begin()
            code = nursery.run(scene.order | {"at": at, "moment": moment})
            assert code == -signal.SIGKILL, f"{moment} step {at}, {step}"
            reader.look()

            scene.complete()

            scene.check_finished()


def test_an_extension_and_a_retry_change_what_is_seen(set_scene):
    """So that there is something to tell apart above."""
    retry = set_scene("retry")
    assert retry.before is not None
    changed = zip(
        retry.before["completion"].to_pylist(), retry.after["completion"].to_pylist(), strict=True
    )
    assert [pair for pair in changed if pair[0] != pair[1]] == [
        ("[ccc", "[cccc]"),
        ("[ddd", "[dddd]"),
    ]


def test_a_row_behind_a_torn_one_in_the_journal_is_kept(set_scene, nursery, tokenizer):
    """Three lives: one tears the journal, one writes on, one takes over what both left."""
    scene = set_scene("run")
    scene.begin()
    torn = {"at": "append journal/000000", "moment": "inside"}
    assert nursery.run(scene.order | torn) == -signal.SIGKILL
    whole = {"at": "rename out/part-000000.parquet", "moment": "before"}
    assert nursery.run(scene.order | whole) == -signal.SIGKILL
    engine = FailingEngine(tokenizer)

    complete(scene.order, engine, Disk())

    # Row 2 has no prompt; row 1 was the unit's last, and finished when the part was written.
    assert engine.begun == {1, 4, 5, 6}
    scene.check_finished()


@pytest.mark.parametrize("command", ["run", "extend", "retry"])
def test_kills_upon_kills_cost_nothing(set_scene, nursery, command):
    scene = set_scene(command, "machine")
    reader, pick = scene.begin(), random.Random(command)

    codes = []
    while not codes or codes[-1]:
        kill = {"at": pick.randint(1, 40), "moment": pick.choice(["before", "inside", "after"])}
        codes.append(nursery.run(scene.order | kill))
        reader.look()

    # How many steps a run has left depends on what the kills before it took.
    assert len(codes) > 1
    assert set(codes[:-1]) == {-signal.SIGKILL}
    scene.check_finished()


def run_chaos(*arguments: str) -> dict[str, Any]:
    """What the script counted."""
    command = [sys.executable, str(CHAOS), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_random_kills_of_the_real_engine_cost_seconds_at_most():
    counts = run_chaos("--rounds", "6", "--no-steps", "--engines", "1")

    assert counts["random_kills"] == 6
    assert counts["looks"] >= 6
    assert sum(counts["commands"].values()) >= 1


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_hundreds_of_kills_cost_seconds_at_most():
    counts = run_chaos("--rounds", "200", "--seed", "0")

    assert counts["random_kills"] == 200
    assert counts["steps"] > 50
    assert counts["step_kills"] >= 2 * counts["steps"]
    assert counts["torn_logs"] > 0
    assert counts["parts_adopted"] > 0
    assert counts["resumed_rows"] > 0
    assert all(counts["phases"].values()), counts["phases"]
    assert all(counts["commands"].values()), counts["commands"]
