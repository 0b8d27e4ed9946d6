"""The bytes of an input file as a short text, and whether a file is still what it was.

A digest that was taken stands for as long as the file's stamp does, but for one gap: a file system
writes times by a clock with ticks, and a second write within a tick leaves the stamp as it is. So a
digest counts as certain only if it was taken well after the time in the stamp, as in git's index.
"""

import dataclasses
import hashlib
import threading
import time

from jaxpaged.errors import InputSchemaError
from jaxpaged.job.input.file_record import FileRecord
from jaxpaged.storage.file_stat import FileStat
from jaxpaged.storage.files import OpenFile, SourceFiles

TICK_NS = 2_000_000_000
"""No file system's clock is coarser."""

_LARGE_BYTES = 64 * 1024 * 1024
_BUFFER_BYTES = 1024 * 1024


class Stopped(Exception):
    """Nobody waits for the digest any more."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """A file's bytes, told from all others.

    Attributes:
        text: As in `FileRecord.content`.
        hashed_at: As in `FileRecord.hashed_at`.
    """

    text: str
    hashed_at: int


def take(
    file: OpenFile, stat: FileStat, known: FileRecord | None, *, stop: threading.Event
) -> Content:
    """The content of an open file; reads it only if nobody knows it yet.

    Args:
        file: The file.
        stat: What it was like just before.
        known: What an earlier run knew of it.
        stop: Ends the reading early.

    Raises:
        Stopped: `stop` was set.
        OSError: The file cannot be read.
    """
    if known is not None and known.stamp == stat.stamp and is_certain(known, stat):
        return Content(text=known.content, hashed_at=known.hashed_at)
    now = time.time_ns()
    if stat.etag is not None:
        return Content(text=f"etag:{stat.etag}", hashed_at=now)
    age = now - (stat.changed_ns or 0)
    if stat.size > _LARGE_BYTES and 0 <= age < TICK_NS:
        # Cheaper than to read it again for certainty.
        stop.wait((TICK_NS - age) / 1e9)
        now = time.time_ns()
    return Content(text=_sha256(file, stop), hashed_at=now)


def is_certain(record: FileRecord, stat: FileStat) -> bool:
    """Whether a record's content is that of every file with the record's stamp."""
    return stat.changed_ns is None or record.hashed_at - stat.changed_ns >= TICK_NS


class FileWatch:
    """Tells whether files are still what they were when they were planned.

    Any other stamp counts as a change, even if the bytes are the same again: what was read in
    between may have been others.

    Attributes:
        files: Where they are looked for.
    """

    def __init__(self, files: SourceFiles) -> None:
        self.files = files
        self._certain: set[str] = set()

    def has_changed(self, place: str, record: FileRecord) -> bool:
        """Whether something happened to a file since its record was made.

        Raises:
            OSError: It cannot be looked at.
        """
        stat = self.files.stat(place)
        if stat.stamp != record.stamp:
            return True
        if is_certain(record, stat) or place in self._certain:
            return False
        # The stamp had been seen when the record was made, so from a tick later on none hides a
        # change, whatever the time in it.
        is_late = time.time_ns() - record.hashed_at >= TICK_NS
        with self.files.open(place) as file:
            if _sha256(file, threading.Event()) != record.content:
                return True
        if is_late:
            self._certain.add(place)
        return False


def changed(place: str) -> InputSchemaError:
    """What to tell a user who changed a file under a running job."""
    return InputSchemaError(
        f"{place}: changed while the job was running; if it holds what it held, run the job again "
        "to go on, else put it back as it was, or start a new job in another output folder"
    )


def vanished(place: str, error: Exception) -> InputSchemaError:
    """What to tell a user whose file cannot be read any more."""
    return InputSchemaError(f"{place}: cannot read it any more: {reason(error)}")


def unreadable(place: str, error: Exception) -> InputSchemaError:
    """What to tell a user whose input file cannot be read."""
    return InputSchemaError(f"{place}: cannot read it as Parquet: {reason(error)}")


def reason(error: Exception) -> str:
    """Why reading failed, in a line."""
    text = getattr(error, "strerror", None) or str(error)
    return next(iter(text.splitlines()), type(error).__name__)


def _sha256(file: OpenFile, stop: threading.Event) -> str:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    file.seek(0)
    while num_bytes := file.readinto(buffer):
        if stop.is_set():
            raise Stopped
        digest.update(buffer[:num_bytes])
    return f"sha256:{digest.hexdigest()}"
