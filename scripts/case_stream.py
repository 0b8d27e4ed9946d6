"""Runs the cases of a check one after another, in a process that may die, and tells of each.

What is told goes to standard output, a JSON object a line, and nothing else does once `take_stdout`
was called:

    {"device": ...}                              what the cases run on
    {"cases": {NAME: is it ours}}                all of them, in order
    {"starts": [NAMES]}                          one of these is to blame if nothing follows
    {"case": NAME, "passed": ..., ...}           what came out
    {"case": NAME, "error": TEXT}                it failed
    {"left_out": NAME, "reason": TEXT}
    {"ended": REASON}                            "done", "fresh process", "no time" or "device lost"

Cases are compiled several at a time, and nothing else is done meanwhile, so that times are of an
idle machine. Knows nothing of what the cases do.
"""

import dataclasses
import itertools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, TextIO

MOST_ERROR_CHARACTERS = 1500

Ending = Literal["done", "fresh process", "no time", "device lost"]


class LeftOut(Exception):
    """A case cannot be run here, and that is no fault: the reason."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Something that is checked or measured.

    Attributes:
        name: Tells it from all others of its section.
        prepare: Compiles; may run beside that of other cases, in a thread.
        run: What comes out, from what `prepare` gave; `passed` says whether it is right.
        is_ours: A failure is one of this project's, not of what it is compared with.
        is_alone: Needs a process of its own, for memory is measured over a process's life.
    """

    name: str
    run: Callable[[Any], dict[str, object]]
    prepare: Callable[[], Any] = lambda: None
    is_ours: bool = True
    is_alone: bool = False


class Deadline:
    """A point in time."""

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds until then; negative behind it."""
        return self._at - time.monotonic()


_taken: list[TextIO] = []
"""Where standard output led before it was taken."""


def take_stdout() -> None:
    """Keeps standard output for `tell`; what libraries print goes to standard error from here on.

    By file descriptors, as compilers and drivers print past Python. Processes that are started do
    not inherit the private one, so it ends with this process.
    """
    sys.stdout.flush()
    _taken.append(os.fdopen(os.dup(1), "w"))
    os.dup2(2, 1)


def tell(event: Mapping[str, object]) -> None:
    """Print at once: the next case may end the process."""
    print(json.dumps(event), file=_taken[-1] if _taken else sys.stdout, flush=True)


def run_cases(
    cases: Iterable[Case],
    *,
    done: Collection[str],
    deadline: Deadline,
    num_together: int,
    is_alive: Callable[[], bool],
) -> None:
    """Runs those that are not done yet, until time is over.

    Args:
        cases: In order of importance.
        done: Names of cases that are not to be run again.
        deadline: When to stop; looked at before each case.
        num_together: Cases that are compiled at a time.
        is_alive: Whether the device still works; asked after a failure.
    """
    todo = [case for case in cases if case.name not in done]
    ending: Ending = "done"
    with ThreadPoolExecutor(num_together) as executor:
        for group in _groups(todo, num_together):
            if deadline.left() <= 0:
                ending = "no time"
                break
            ending = _run_group(group, executor, deadline, is_alive)
            if ending == "done" and group[0].is_alone and group[0] is not todo[-1]:
                ending = "fresh process"
            if ending != "done":
                break
    tell({"ended": ending})


def _groups(cases: list[Case], size: int) -> Iterator[list[Case]]:
    """So many at a time; those that have to be alone are."""
    for is_alone, group in itertools.groupby(cases, key=lambda case: case.is_alone):
        together = list(group)
        step = 1 if is_alone else size
        for first in range(0, len(together), step):
            yield together[first : first + step]


def _run_group(
    group: list[Case],
    executor: ThreadPoolExecutor,
    deadline: Deadline,
    is_alive: Callable[[], bool],
) -> Ending:
    tell({"starts": [case.name for case in group]})
    prepared = [(case, executor.submit(case.prepare)) for case in group]
    for _, future in prepared:
        future.exception()
    for case, future in prepared:
        if deadline.left() <= 0:
            return "no time"
        if len(group) > 1:
            tell({"starts": [case.name]})
        if not _run_case(case, future) and not is_alive():
            return "device lost"
    return "done"


def _run_case(case: Case, prepared: Future[Any]) -> bool:
    """Whether it ran to its end."""
    started = time.monotonic()
    try:
        found = case.run(prepared.result())
    except LeftOut as reason:
        tell({"left_out": case.name, "reason": str(reason)})
        return True
    except Exception as error:  # compilers and devices may raise anything
        tell({"case": case.name, "error": _text(error), "trace": _trace(error)})
        return False
    tell({"case": case.name, **found, "seconds": round(time.monotonic() - started, 2)})
    return True


def _text(error: Exception) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= MOST_ERROR_CHARACTERS else text[:MOST_ERROR_CHARACTERS] + " ..."


def _trace(error: Exception) -> list[str]:
    """Where it came from, the innermost last."""
    frames = traceback.extract_tb(error.__traceback__)
    return [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames[-4:]]
