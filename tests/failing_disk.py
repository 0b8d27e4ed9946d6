"""Disks that number what is done to them, and that fail, or end the process, at a chosen step.

A step is one operation of `Disk` in the main thread. The thread that writes signs of life has
none, so that a job takes the same steps each time; a disk that failed fails for that thread too.
"""

import dataclasses
import errno
import os
import pathlib
import signal
import threading
from collections.abc import Callable, Container
from typing import Any, Literal, NoReturn

from jaxpaged.storage.disk import Disk

Moment = Literal["before", "inside", "after"]
"""Of a step: "inside" is when half of its bytes are written, if it writes any."""

ALL = frozenset({"write", "append", "truncate", "sync", "rename", "link", "unlink", "make_folder"})
HALVES = ("write", "append")
"""What writes bytes, and can stop in the middle."""

NEEDS_SPACE = frozenset({"write", "append", "rename", "link", "make_folder"})
"""What a full disk refuses."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One operation on a disk.

    Attributes:
        operation: The method's name.
        path: The file or folder that is changed.
        act: Does it.
        half: Does half of it: of what has no halves, nothing.
    """

    operation: str
    path: pathlib.Path
    act: Callable[[], Any]
    half: Callable[[], Any]

    def __str__(self) -> str:
        return f"{self.operation} {self.path.parent.name}/{self.path.name}"


class NumberedDisk(Disk):
    """The real disk; its steps are numbered from 1 on.

    Attributes:
        steps: The steps that were begun, for people.
    """

    def __init__(self) -> None:
        self.steps: list[str] = []

    def take(self, step: Step, number: int | None) -> None:
        """Takes a step; one of another thread has no number."""
        step.act()

    def write(self, path: pathlib.Path, data: bytes) -> None:
        half = data[: len(data) // 2]
        self._take(
            "write", path, lambda: Disk().write(path, data), lambda: Disk().write(path, half)
        )

    def append(self, path: pathlib.Path, data: bytes) -> None:
        half = data[: len(data) // 2]
        self._take(
            "append", path, lambda: Disk().append(path, data), lambda: Disk().append(path, half)
        )

    def truncate(self, path: pathlib.Path, num_bytes: int) -> None:
        self._take("truncate", path, lambda: Disk().truncate(path, num_bytes))

    def sync(self, path: pathlib.Path) -> None:
        self._take("sync", path, lambda: Disk().sync(path))

    def rename(self, path: pathlib.Path, target: pathlib.Path) -> None:
        self._take("rename", target, lambda: Disk().rename(path, target))

    def link(self, path: pathlib.Path, target: pathlib.Path) -> None:
        self._take("link", target, lambda: Disk().link(path, target))

    def unlink(self, path: pathlib.Path) -> None:
        self._take("unlink", path, lambda: Disk().unlink(path))

    def make_folder(self, path: pathlib.Path) -> None:
        self._take("make_folder", path, lambda: Disk().make_folder(path))

    def _take(
        self,
        operation: str,
        path: pathlib.Path,
        act: Callable[[], Any],
        half: Callable[[], Any] = lambda: None,
    ) -> None:
        step = Step(operation=operation, path=path, act=act, half=half)
        if threading.current_thread() is not threading.main_thread():
            self.take(step, None)
            return
        self.steps.append(str(step))
        self.take(step, len(self.steps))


class KillingDisk(NumberedDisk):
    """Sends its own process SIGKILL at a step.

    Args:
        at: The step's number, or what it is: the first such step.
        moment: When.
    """

    def __init__(self, at: int | str, moment: Moment = "before") -> None:
        super().__init__()
        self._at = at
        self._moment = moment

    def take(self, step: Step, number: int | None) -> None:
        if number is None or self._at not in (number, str(step)):
            step.act()
            return
        if self._moment != "before":
            (step.half if self._moment == "inside" else step.act)()
        os.kill(os.getpid(), signal.SIGKILL)


class FailingDisk(NumberedDisk):
    """Fails from a step on.

    Args:
        first: The first step that may fail.
        code: Why, as in `errno`.
        operations: What fails.
        lasts: It fails from then on; otherwise once.

    Attributes:
        num_failures: How often it did.
    """

    def __init__(
        self,
        first: int,
        code: int = errno.ENOSPC,
        *,
        operations: Container[str] = ALL,
        lasts: bool = True,
    ) -> None:
        super().__init__()
        self.num_failures = 0
        self._first = first
        self._code = code
        self._operations = operations
        self._lasts = lasts

    def take(self, step: Step, number: int | None) -> None:
        is_due = (number or len(self.steps)) >= self._first and (
            self._lasts or (number is not None and not self.num_failures)
        )
        if not is_due or step.operation not in self._operations:
            step.act()
            return
        self.num_failures += 1
        step.half()
        self._fail(step.path)

    def _fail(self, path: pathlib.Path) -> NoReturn:
        raise OSError(self._code, os.strerror(self._code), str(path))
