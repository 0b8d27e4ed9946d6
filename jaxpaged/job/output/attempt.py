"""Runs of a job on one output folder, numbered: who writes now, how far it is, how each one ended.

    attempts/000003.json    who began it, created exclusively
    attempts/000003.beat    how far it is, replaced every few seconds
    attempts/000003.end     how it ended; missing while it runs, and for ever if it was killed

The number is also the fencing number: where the store has no lock of its own, the highest number
is the writer as long as its beat is fresh, and an older writer that wakes up late sees that it was
replaced before it commits anything.
"""

import contextlib
import dataclasses
import json
import os
import socket
import threading
import types
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from jaxpaged.errors import OutputConflictError, StorageError
from jaxpaged.job.output import history
from jaxpaged.storage.store import Store

FOLDER = "_jaxpaged/attempts"
LEASE_SECONDS = 60.0
"""A writer on a store without locks that was silent for so long counts as gone."""

_BEAT_SECONDS = 2.0
_CLOCK = f"{FOLDER}/clock"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFacts:
    """What is known of one attempt.

    Attributes:
        number: 1, 2, ...
        begin: Host, process id and time.
        beat: How far it was, at its last sign of life; empty before the first.
        end: State, message and time; None for one that runs, or was killed.
    """

    number: int
    begin: Mapping[str, Any]
    beat: Mapping[str, Any]
    end: Mapping[str, Any] | None

    def __str__(self) -> str:
        host, pid, began = (self.begin.get(key, "?") for key in ("host", "pid", "began"))
        return f"attempt {self.number} on host {host}, process {pid}, since {began}"


def all_attempts(store: Store) -> list[AttemptFacts]:
    """The attempts so far, in order."""
    return [_facts(store, number) for number in _numbers(store)]


def last_attempt(store: Store) -> AttemptFacts | None:
    """The latest attempt."""
    numbers = _numbers(store)
    return _facts(store, numbers[-1]) if numbers else None


def is_alive(store: Store, attempt: AttemptFacts) -> bool:
    """Whether an attempt on a store without locks is still to be reckoned with.

    Both moments are the store's own: clocks of hosts may differ. Writes to the store.
    """
    if attempt.end is not None:
        return False
    store.replace(_CLOCK, b"")
    name = f"{FOLDER}/{attempt.number:06d}"
    heard = [store.modified(f"{name}.beat"), store.modified(f"{name}.json")]
    now, last = store.modified(_CLOCK), max((t for t in heard if t is not None), default=None)
    return now is not None and last is not None and now - last < LEASE_SECONDS


class Attempt:
    """This process's attempt, from the moment it is the writer; use it in a `with` statement.

    Args:
        store: The output.
        progress: Says how far the run is, in JSON's types; asked in another thread.

    Attributes:
        number: Its number.

    Raises:
        ConfigError: The place cannot be written to.
        OutputConflictError: Another process is the writer; the message names it.
    """

    def __init__(self, store: Store, progress: Callable[[], Mapping[str, Any]] = dict) -> None:
        self._store = store
        self._progress = progress
        self._is_over = threading.Event()
        self._state: tuple[str, str] | None = None
        if not store.lock():
            raise _conflict(store, last_attempt(store))
        try:
            self.number = self._take_number()
        except BaseException:
            store.unlock()
            raise
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def __enter__(self) -> "Attempt":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._thread.join()
        state, message = self._state or ("ended" if error is None else "failed", _line(error))
        content = {"state": state, "message": message, "ended": history.now()}
        try:
            # A full disk that ended the run refuses this too.
            with contextlib.suppress(StorageError):
                self._write("beat", self._progress())
                self._write("end", content)
        finally:
            self._store.unlock()

    def ends(self, state: str, message: str = "") -> None:
        """How the attempt ended, for `jaxpaged status`; written when it is left."""
        self._state = (state, message)

    def check(self) -> None:
        """Ends the run of a writer that was replaced.

        Raises:
            OutputConflictError: A later attempt has begun.
        """
        if self._store.excludes_writers:
            return
        if _numbers(self._store)[-1:] > [self.number]:
            last = last_attempt(self._store)
            raise OutputConflictError(
                f"output.path: this process was silent for more than {LEASE_SECONDS:.0f} s and "
                f"{last} took over; it continues this job, what is committed stays"
            )

    def _take_number(self) -> int:
        last = last_attempt(self._store)
        if last is not None and not self._store.excludes_writers and is_alive(self._store, last):
            raise _conflict(self._store, last)
        number = 1 if last is None else last.number + 1
        content = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "began": history.now(),
            "nonce": uuid.uuid4().hex,
        }
        if not self._store.create(f"{FOLDER}/{number:06d}.json", _to_bytes(content)):
            raise _conflict(self._store, last_attempt(self._store))
        return number

    def _beat(self) -> None:
        pause = _BEAT_SECONDS if self._store.excludes_writers else LEASE_SECONDS / 6
        while not self._is_over.wait(pause):
            with contextlib.suppress(StorageError):
                self._write("beat", self._progress())

    def _write(self, kind: str, content: Mapping[str, Any]) -> None:
        data = _to_bytes({"time": history.now(), **content})
        self._store.replace(f"{FOLDER}/{self.number:06d}.{kind}", data)


def _numbers(store: Store) -> list[int]:
    names = [name.removesuffix(".json") for name in store.entries(FOLDER) if ".json" in name]
    return sorted(int(name) for name in names if name.isdecimal())


def _facts(store: Store, number: int) -> AttemptFacts:
    begin, beat, end = (
        _read(store, f"{FOLDER}/{number:06d}.{kind}") for kind in ("json", "beat", "end")
    )
    return AttemptFacts(number=number, begin=begin or {}, beat=beat or {}, end=end)


def _read(store: Store, name: str) -> dict[str, Any] | None:
    try:
        content = json.loads(store.read(name) or b"null")
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _conflict(store: Store, holder: AttemptFacts | None) -> OutputConflictError:
    who = f" ({holder})" if holder else ""
    how_long = (
        ""
        if store.excludes_writers
        else (f" or, if it was killed, for {LEASE_SECONDS:.0f} s after its last sign of life")
    )
    return OutputConflictError(
        f"output.path: another process is writing to {store.url}{who}; wait until it has "
        f"ended{how_long}, or choose another folder"
    )


def _line(error: BaseException | None) -> str:
    return (str(error).splitlines() or [""])[0]


def _to_bytes(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, allow_nan=False) + "\n").encode()
