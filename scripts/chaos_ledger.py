"""What a child of `chaos_job` writes down while it lives, and what that says once it was killed.

A line of JSON for each event, written at once and outside of the output:

    born                     the process exists
    note      text           what the job says about itself
    load, loaded             the engine's weights are loaded
    add       row            a row is given to the engine
    begin                    a step of the engine begins
    end       sampled        it has ended: tokens sampled so far, and the rows that it finished,
              finished       each with its tokens
    resumed   rows           rows that came from the journal so far
    disk      step           a step of the disk begins
"""

import collections
import dataclasses
import json
import os
import pathlib
import time
from collections.abc import Iterator
from typing import Any

PHASES = ("starting", "loading", "generating", "journaling", "committing", "finishing")

_COMMITTING = ("/part-", "commits-", "commits/", "/commits")
_FINISHING = ("rename out/_SUCCESS", "_SUCCESS.tmp", "/report.", ".beat", ".end")


class Ledger:
    """Writes events.

    Args:
        path: The file; it is appended to.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(self, event: str, **facts: object) -> None:
        """Writes an event and its moment, whole or not at all."""
        line = json.dumps({"event": event, "time": time.monotonic(), **facts})
        os.write(self._file, f"{line}\n".encode())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """A row that finished.

    Attributes:
        time: When its step had ended.
        tokens: What was sampled for it.
        is_safe: It has to be in the journal, or in a part, whenever the kill came.
    """

    time: float
    tokens: int
    is_safe: bool


class Life:
    """The events of one child.

    Args:
        path: Its ledger.

    Attributes:
        events: Those read so far.
        phase: Where in its life the child is.
        passed: Events by the phase they were in.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.events: list[dict[str, Any]] = []
        self.phase = "starting"
        self.passed: collections.Counter[str] = collections.Counter()
        self._path = path
        self._num_bytes = 0
        self._has_begun = False

    def read(self) -> None:
        """Reads what was written since."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._num_bytes)
            lines = file.read().splitlines(keepends=True)
        for line in lines:
            if line.endswith(b"\n"):
                self._num_bytes += len(line)
                self._take(json.loads(line))

    @property
    def sampled_tokens(self) -> int:
        """Tokens that whole steps sampled."""
        return max((event["sampled"] for event in self._named("end")), default=0)

    @property
    def resumed_rows(self) -> int:
        """Rows that came from the journal."""
        return max((event["rows"] for event in self._named("resumed")), default=0)

    @property
    def added_rows(self) -> list[int]:
        """Rows that were given to the engine."""
        return [event["row"] for event in self._named("add")]

    @property
    def last_step(self) -> str:
        """The last step of the disk; "" before the first."""
        return next((event["step"] for event in reversed([*self._named("disk")])), "")

    def num_notes(self, text: str) -> int:
        """How many notes have this text in them."""
        return sum(text in event["text"] for event in self._named("note"))

    def finishes(self, interval: float) -> dict[int, Finish]:
        """The rows that finished.

        After each step, before the next one begins, the journal is told of the rows and asked to
        write if it is time. So a row has waited since the next step's begin at the latest; the
        first asking that is an interval later writes it, and is over when one more step begins.

        Args:
            interval: The journal's, in seconds.
        """
        found: dict[int, Finish] = {}
        steps = [event for event in self.events if event["event"] in ("begin", "end")]
        for place, event in enumerate(steps):
            if event["event"] == "end":
                is_safe = _is_written(steps[place + 1 :], interval)
                for row, tokens in event["finished"]:
                    found[row] = Finish(time=event["time"], tokens=tokens, is_safe=is_safe)
        return found

    def _take(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        name = event["event"]
        if name == "begin":
            self._has_begun = True
        if name == "disk":
            self.phase = _disk_phase(event["step"], "generating" if self._has_begun else "starting")
        elif name in ("load", "loaded", "add", "begin", "end"):
            self.phase = "generating" if self._has_begun else "loading"
        self.passed[self.phase] += 1

    def _named(self, name: str) -> Iterator[dict[str, Any]]:
        return (event for event in self.events if event["event"] == name)


def _is_written(later: list[dict[str, Any]], interval: float) -> bool:
    """Whether the journal has written what it was told before the first of these events."""
    if not later:
        return False
    due = later[0]["time"] + interval
    was_asked = not interval
    for event in later:
        if was_asked and event["event"] == "begin":
            return True
        was_asked = was_asked or (event["event"] == "end" and event["time"] >= due)
    return False


def _disk_phase(step: str, otherwise: str) -> str:
    if any(part in step for part in _FINISHING):
        return "finishing"
    if any(part in step for part in _COMMITTING):
        return "committing"
    return "journaling" if "journal" in step else otherwise
