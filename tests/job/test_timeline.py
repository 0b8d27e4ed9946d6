import itertools

import pytest
from scripted_engine import ScriptedStats

from jaxpaged.job.timeline import Timeline, TimelineRecorder


class Clock:
    def __init__(self) -> None:
        self.now = 5.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def run(
    clock: Clock, *, num_steps: int, seconds: float, max_intervals: int = 400
) -> tuple[ScriptedStats, Timeline]:
    """The timeline of equal steps, each of which computes 10 tokens and samples 4."""
    stats = ScriptedStats(steps=3, prefill_tokens=50, sampled_tokens=7)
    recorder = TimelineRecorder(stats, clock, max_intervals)
    for step in range(num_steps):
        clock.now += seconds
        stats.steps += 1
        stats.prefill_tokens += 6
        stats.decode_tokens += 4
        stats.sampled_tokens += 4
        stats.padding_tokens += 2
        stats.live_slot_steps += 40
        stats.used_blocks, stats.running, stats.waiting = 8, 4, num_steps - step
        recorder.look()
    return stats, recorder.timeline()


def test_slow_steps_have_an_interval_each(clock):
    _, found = run(clock, num_steps=3, seconds=0.5)

    assert found == Timeline(
        seconds=(0.5, 1.0, 1.5),
        steps=(1, 1, 1),
        computed_tokens=(10, 10, 10),
        sampled_tokens=(4, 4, 4),
        padding_tokens=(2, 2, 2),
        used_blocks=(8.0, 8.0, 8.0),
        live_tokens=(40.0, 40.0, 40.0),
        running=(4.0, 4.0, 4.0),
        waiting=(3.0, 2.0, 1.0),
    )
    assert found.edges == (0.0, 0.5, 1.0, 1.5)


@pytest.mark.parametrize("num_steps", [1, 7, 10_000, 100_003])
def test_however_many_steps_there_are_nothing_is_lost_and_the_intervals_are_few(clock, num_steps):
    _, found = run(clock, num_steps=num_steps, seconds=0.01, max_intervals=20)

    assert 1 <= len(found) <= 20
    assert sum(found.steps) == num_steps
    assert sum(found.computed_tokens) == 10 * num_steps
    assert sum(found.sampled_tokens) == 4 * num_steps
    assert sum(found.padding_tokens) == 2 * num_steps
    assert set(found.used_blocks) == {8.0}
    assert set(found.live_tokens) == {40.0}
    assert found.seconds[-1] == pytest.approx(0.01 * num_steps, abs=1e-3)
    assert list(found.seconds) == sorted(found.seconds)
    assert sorted(found.waiting, reverse=True) == list(found.waiting)


def test_later_intervals_are_as_long_as_merged_ones(clock):
    _, found = run(clock, num_steps=3000, seconds=0.013, max_intervals=40)

    lengths = [stop - start for start, stop in itertools.pairwise(found.edges)][:-1]
    assert max(lengths) < 1.5 * min(lengths)
    assert len(found) >= 20


def test_a_run_without_steps_has_an_empty_one(clock):
    _, found = run(clock, num_steps=0, seconds=1.0)
    assert found == Timeline()
    assert len(found) == 0


def test_every_column_has_an_entry_for_each_interval(clock):
    _, found = run(clock, num_steps=500, seconds=0.03)
    columns = [getattr(found, name) for name in Timeline.__dataclass_fields__]
    assert {len(column) for column in columns} == {len(found)}
