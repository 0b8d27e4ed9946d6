"""Processes that begin with everything imported, to be killed by the hundred.

A server imports what its children need, once, and forks one child at a time; importing JAX takes
seconds, forking milliseconds. Both ends of the pipe between them are here:

    serve(run)                                      # the server: `run(order)` is a child's life
    with Nursery([sys.executable, "server.py"], log) as nursery:
        child = nursery.start({"any": "JSON"})
        child.kill()

The server has no threads of its own and never starts JAX's device, so that forking it is sound.
Needs Linux (pidfd).
"""

import gc
import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def serve(run: Callable[[dict[str, Any]], None]) -> None:
    """Forks a child for each order on stdin, until its end.

    Args:
        run: Takes the order; a child that returns from it ends with 0, one that raises with 1.
    """
    # So that no child copies all of this when it counts references.
    gc.freeze()
    while line := sys.stdin.readline():
        pid = os.fork()
        if not pid:
            _live(run, json.loads(line))
        _answer(pid)
        # A child that has ended keeps its id until the other side is done with it.
        if not sys.stdin.readline():
            os.kill(pid, signal.SIGKILL)
        _answer(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _answer(number: int) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


def _live(run: Callable[[dict[str, Any]], None], order: dict[str, Any]) -> None:
    # What a child prints is not for the other side.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    code = 1
    try:
        run(order)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


class Child:
    """A process that a nursery started.

    Attributes:
        pid: Its id.
    """

    def __init__(self, pid: int, reap: Callable[[], int]) -> None:
        self.pid = pid
        self._handle = os.pidfd_open(pid)
        self._reap = reap

    def has_ended(self, seconds: float = 0.0) -> bool:
        """Whether it has, after waiting for so long at most."""
        ready = select.select([self._handle], [], [], seconds)[0]
        return bool(ready)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Sends a signal; fine if the process has ended."""
        signal.pidfd_send_signal(self._handle, number)

    def wait(self, seconds: float = 120.0) -> int:
        """Its exit code once it has ended, or the signal that ended it, below zero."""
        if not self.has_ended(seconds):
            self.kill()
            self.has_ended(seconds)
            os.close(self._handle)
            self._reap()
            raise TimeoutError(f"process {self.pid} did not end within {seconds:.0f} s")
        os.close(self._handle)
        return self._reap()


class Nursery:
    """Starts children, one at a time; use it in a `with` statement.

    Args:
        command: Runs a server.
        log: Where the server and its children write what they print.
    """

    def __init__(self, command: Sequence[str], log: pathlib.Path) -> None:
        self._command = command
        self._log = log

    def __enter__(self) -> "Nursery":
        with self._log.open("ab") as log:
            self._server = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self._server.communicate()

    def start(self, order: Mapping[str, Any]) -> Child:
        """Starts a child."""
        return Child(self._ask(json.dumps(order)), lambda: self._ask("reap"))

    def run(self, order: Mapping[str, Any]) -> int:
        """Starts a child and waits for it; returns its exit code."""
        return self.start(order).wait()

    def _ask(self, line: str) -> int:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(f"{line}\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        if not answer:
            raise RuntimeError(f"the server ended; {self._log} says why")
        return int(answer)
