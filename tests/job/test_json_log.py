import datetime
import json
import logging
import pathlib
import re
import threading
import time
import warnings
from typing import Any

import pytest

from jaxpaged.job.json_log import JsonLog, JsonProgress
from jaxpaged.job.progress import Snapshot
from jaxpaged.job.runner import run_job

DOCUMENT = (pathlib.Path(__file__).parents[2] / "docs/live_metrics.md").read_text()


class Log:
    """A JSON log in memory."""

    def __init__(self) -> None:
        self.written: list[str] = []
        self.log = JsonLog(self.written.append)

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.written]

    @property
    def events(self) -> list[dict[str, Any]]:
        """The lines without what all of them have."""
        return [
            {key: value for key, value in line.items() if key not in ("time", "level")}
            for line in self.lines
        ]


@pytest.fixture
def log() -> Log:
    return Log()


def snapshot(rows: int) -> Snapshot:
    return Snapshot(
        rows=rows,
        resumed=1,
        errors=2,
        prompt_tokens=30,
        completion_tokens=10 * rows,
        running=4,
        waiting=8,
        used_blocks=5,
        num_blocks=20,
    )


def fields_of(event: str) -> set[str]:
    """The fields that the document gives an event."""
    found = re.search(rf"^\| `{event}` \| ([\w, ]+) \|", DOCUMENT, re.MULTILINE)
    assert found is not None, event
    return set(found[1].split(", "))


def test_a_line_says_when_how_bad_and_what(log) -> None:
    before = datetime.datetime.now(datetime.UTC)
    log.log.write("note", {"message": 'two\nlines, "quotes", ü and \ud800'}, "warning")

    [line] = log.lines
    assert list(line) == ["time", "level", "event", "message"]
    assert line["message"] == 'two\nlines, "quotes", ü and \ud800'
    assert line["level"] == "warning"
    assert log.written[0].isascii()
    assert "\n" not in log.written[0]
    written = datetime.datetime.fromisoformat(line["time"])
    assert written.utcoffset() == datetime.timedelta()
    assert abs((written - before).total_seconds()) < 60


def test_progress_is_a_line_every_ten_seconds_and_one_at_the_end(log) -> None:
    now = 100.0
    progress = JsonProgress(log.log, lambda: now)

    progress.note("the pool")
    progress.begin(total=100, done=0, journaled=1)
    for second in range(26):
        now = 100.0 + second
        progress.update(snapshot(rows=second + 1))
    progress.end()

    note, begin, *states = log.events
    assert note == {"event": "note", "message": "the pool"}
    assert begin == {"event": "begin", "total": 100, "done": 0, "journaled": 1}
    assert [state["rows"] for state in states] == [11, 21, 26]
    assert states[0] == {
        "event": "progress",
        "total": 100,
        "rows": 11,
        "resumed": 1,
        "errors": 2,
        "skipped": 0,
        "prompt_tokens": 30,
        "completion_tokens": 110,
        "running": 4,
        "waiting": 8,
        "used_blocks": 5,
        "num_blocks": 20,
        "rows_per_second": 1.0,
        "tokens_per_second": 10.0,
        "seconds_left": 89.0,
    }
    assert fields_of("progress") | {"event"} == set(states[0])
    assert fields_of("begin") | {"event"} == set(begin)


def test_a_job_that_ends_well_says_so_last(log, write_rows, make_spec, engine) -> None:
    write_rows(q=["a", None, "cccccc"])
    spec = make_spec(input={"prompt_column": "q"}, sampling={"max_tokens": 4})

    report = run_job(spec, engine=engine(), progress=JsonProgress(log.log))
    log.log.ends(report, exit_code=0)

    events = [event["event"] for event in log.events]
    assert events == ["note", "begin", "progress", *["warning"] * len(report.warnings), "end"]
    assert len(report.warnings) == 2
    end = log.events[-1]
    assert end == {
        "event": "end",
        "state": "finished",
        "exit_code": 0,
        "rows": 3,
        "errors": 1,
        "skipped": 0,
        "path": spec.output.path,
    }
    assert fields_of("end") | {"event"} == set(end)
    assert [line["level"] for line in log.lines if line["event"] == "warning"] == ["warning"] * 2


@pytest.mark.parametrize(
    ("state", "level"), [("stopped", "warning"), ("too many row errors", "error")]
)
def test_what_ended_a_run_comes_before_its_end(log, state, level) -> None:
    log.log.fails(state, exit_code=7, message="why", traceback=None)

    assert log.events == [
        {"event": level, "message": "why"},
        {"event": "end", "state": state, "exit_code": 7},
    ]
    assert [line["level"] for line in log.lines] == [level, level]


def test_a_retry_that_chose_no_row_ends_too(log) -> None:
    log.log.ends(None, exit_code=0)

    assert log.events == [{"event": "end", "state": "nothing to do", "exit_code": 0}]


def test_warnings_of_python_and_packages_are_lines_too(log) -> None:
    handlers = list(logging.getLogger().handlers)
    with log.log.takes_warnings():
        logging.getLogger("package").info("not worth a line")
        logging.getLogger("package").error("it %s", "broke")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("beware", stacklevel=1)
    logging.getLogger("package").error("no line any more")

    broke, beware = log.lines
    assert (broke["event"], broke["level"]) == ("log", "error")
    assert (broke["logger"], broke["message"]) == ("package", "it broke")
    assert (beware["level"], beware["logger"]) == ("warning", "py.warnings")
    assert "UserWarning: beware" in beware["message"]
    assert logging.getLogger().handlers == handlers


def test_threads_write_one_line_after_the_other() -> None:
    inside, most = [0], [0]

    def write_line(line: str) -> None:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.001)
        inside[0] -= 1

    log = JsonLog(write_line)
    threads = [
        threading.Thread(target=lambda: [log.write("note", {}) for _ in range(5)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert most == [1]


def test_a_reader_that_left_ends_no_job() -> None:
    asked = []

    def gone(line: str) -> None:
        asked.append(line)
        raise BrokenPipeError(32, "Broken pipe")

    JsonLog(gone).write("note", {})

    assert len(asked) == 1
