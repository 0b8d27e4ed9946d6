import io

import pytest
import rich.console

from jaxpaged.job.progress import BarProgress, LineProgress, RecentRates, Snapshot, duration


def snapshot(
    rows: int, tokens: int = 0, errors: int = 0, resumed: int = 0, skipped: int = 0
) -> Snapshot:
    return Snapshot(
        rows=rows,
        resumed=resumed,
        errors=errors,
        prompt_tokens=2 * tokens,
        completion_tokens=tokens,
        running=4,
        waiting=8,
        used_blocks=5,
        num_blocks=20,
        skipped=skipped,
    )


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def lines():
    clock, text = Clock(), io.StringIO()
    progress = LineProgress(rich.console.Console(file=text, width=40), clock)
    return clock, text, progress


def test_a_line_every_ten_seconds(lines):
    clock, text, progress = lines
    progress.begin(total=100, done=0, journaled=0)

    for second in range(31):
        clock.now = 100.0 + second
        progress.update(snapshot(rows=second, tokens=10 * second))

    found = text.getvalue().splitlines()
    assert len(found) == 3
    assert found[0] == (
        "10/100 rows (10%), tokens/s 20 in 10 out, 4 running 8 waiting, pool 25%, ETA 0:01:30"
    )


def test_rows_of_earlier_runs_are_told_apart(lines):
    clock, text, progress = lines

    progress.begin(total=100, done=40, journaled=0)
    progress.begin(total=100, done=40, journaled=1234)
    progress.begin(total=100, done=0, journaled=5)
    progress.note("[bold] is not markup")
    clock.now += 10
    progress.update(snapshot(rows=50, resumed=45))

    assert text.getvalue().splitlines() == [
        "40 of 100 rows are in finished parts",
        "40 of 100 rows are in finished parts, 1,234 more in the journal",
        "0 of 100 rows are in finished parts, 5 more in the journal",
        "[bold] is not markup",
        "50/100 rows (50%), tokens/s 0 in 0 out, 4 running 8 waiting, pool 25%, 45 rows resumed",
    ]


def test_resumed_rows_are_no_speed():
    clock = Clock()
    rates = RecentRates(clock)

    rates.add(snapshot(rows=0))
    clock.now += 10
    last = snapshot(rows=520, resumed=500)
    rates.add(last)

    assert rates.per_second("new_rows") == 2.0
    assert rates.seconds_left(last, 600) == 40.0
    rates.add(snapshot(rows=500, resumed=500))
    assert rates.seconds_left(snapshot(rows=500, resumed=500), 600) is None


def test_the_time_left_comes_from_the_last_minute(lines):
    clock, text, progress = lines
    progress.begin(total=1000, done=0, journaled=0)
    # A slow start, then one row a second.
    progress.update(snapshot(rows=0))
    for second in range(200, 300):
        clock.now = 100.0 + second
        progress.update(snapshot(rows=second - 199, errors=3))

    last = text.getvalue().splitlines()[-1]
    assert "3 errors" in last
    assert "ETA 0:15:0" in last


def test_a_bar_shows_the_state_and_goes_away():
    text = io.StringIO()
    console = rich.console.Console(file=text, width=120, force_terminal=True)
    progress = BarProgress(console)

    progress.begin(total=100, done=40, journaled=3)
    progress.note("the pool")
    progress.update(snapshot(rows=50, errors=2, resumed=43, skipped=4))
    progress._bar.refresh()
    progress.end()

    assert "the pool" in text.getvalue()
    assert "50/100 rows" in text.getvalue()
    assert "40 of 100 rows are in finished parts, 3 more in the journal" in text.getvalue()
    assert "4 running 8 waiting, pool 25%, 43 rows resumed, 2 errors, 4 skipped" in text.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0:00:00"), (59.6, "0:01:00"), (3661.0, "1:01:01"), (-1.0, "0:00:00")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text
