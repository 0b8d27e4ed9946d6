"""Ctrl-C and SIGTERM: the first asks the job to stop after its step, the second ends the process.

The handlers themselves would only run once a long call into the compiler returns; a thread that
waits for the signals' wake-up bytes sees them at once.
"""

import os
import signal
import socket
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

from jaxpaged.errors import JobError

_SIGNALS = (signal.SIGINT, signal.SIGTERM)

# A progress bar hides it, and a process that ends at once cannot ask the bar.
_SHOW_CURSOR = b"\x1b[?25h"


class JobInterrupted(JobError):
    """The job was asked to stop; its finished parts stay and running it again continues."""

    exit_code = 128 + signal.SIGINT


class StopRequest:
    """Listens for signals inside a `with` statement, which must be in the main thread.

    Calling it says whether the job should stop.

    Args:
        on_first: Called, in another thread, when the first signal comes.

    Attributes:
        exit_code: 128 and the number of the first signal; of SIGINT as long as there was none.
    """

    def __init__(self, on_first: Callable[[], None]) -> None:
        self._on_first = on_first
        self._received = threading.Event()
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._old_handlers: list[tuple[signal.Signals, Any]] = []
        self._old_wakeup = -1
        self.exit_code = 128 + signal.SIGINT

    def __call__(self) -> bool:
        """Whether a signal came."""
        return self._received.is_set()

    def __enter__(self) -> "StopRequest":
        self._old_wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._old_handlers = [(number, signal.signal(number, _do_nothing)) for number in _SIGNALS]
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        for number, handler in self._old_handlers:
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_wakeup)
        self._writer.close()
        self._thread.join()
        self._reader.close()

    def _listen(self) -> None:
        # One byte for each signal, its number; nothing once the other end is closed.
        while data := self._reader.recv(1):
            if data[0] not in _SIGNALS:
                continue
            if self._received.is_set():
                if sys.stderr.isatty():
                    os.write(sys.stderr.fileno(), _SHOW_CURSOR)
                os._exit(128 + data[0])
            self.exit_code = 128 + data[0]
            self._received.set()
            self._on_first()


def _do_nothing(number: int, frame: types.FrameType | None) -> None:
    """Python calls it in the main thread; the listener has seen the signal before."""
