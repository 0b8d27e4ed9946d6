"""The journal: finished rows of units in flight, so that a kill loses seconds of them, not units.

One log per unit, `_jaxpaged/journal/<unit>`; it begins when the unit's first rows finish and goes
when the unit is committed. It only saves work: whatever is lost, torn or wrong in a log is
completed again. Knows nothing of prompts and parts.
"""

import dataclasses
import re
import time
from collections.abc import Callable

from jaxpaged.job.output import journal_frame, journal_record
from jaxpaged.job.output.journal_record import RowAddress
from jaxpaged.job.row_window import RowResult
from jaxpaged.job.units import Unit
from jaxpaged.storage.store import Store

FOLDER = "_jaxpaged/journal"
"""Where the logs lie in the output."""

# With a long interval, memory is bounded by this.
_MAX_BUFFER_BYTES = 16 * 1024 * 1024

_LOG_NAME = re.compile(r"[0-9]{6}")


@dataclasses.dataclass(slots=True, kw_only=True)
class _Log:
    """One unit's log.

    Attributes:
        found: The results of earlier runs, by the row's address, its prompt's digest and its
            parameters.
        num_bytes: The bytes at its front that are known to be whole frames.
        is_torn: Something else may follow them.
        buffer: Frames that are still to be appended.
    """

    found: dict[tuple[RowAddress, str | None, str], RowResult]
    num_bytes: int = 0
    is_torn: bool = False
    buffer: bytearray


class Journal:
    """The rows that finished in units that are not committed.

    Args:
        store: The output.
        interval: Seconds that a finished row may wait until it is written; 0 for none.
        clock: Tells the seconds.
    """

    def __init__(
        self, store: Store, *, interval: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._interval = interval
        self._clock = clock
        self._logs: dict[Unit, _Log] = {}
        # When the first frame of each buffer came, the oldest in front.
        self._waiting: dict[Unit, float] = {}

    @property
    def num_rows(self) -> int:
        """Rows of earlier runs in units that were not dropped yet."""
        return sum(len(log.found) for log in self._logs.values())

    def load(self, wanted: Callable[[int], Unit | None]) -> int:
        """Takes in what earlier runs left and mends it; to be called once, before anything else.

        Logs of units that are not wanted, or are not what they were, are deleted; others are cut
        where they are torn.

        Args:
            wanted: The unit with an index, any number of six digits, if it is still to be made.

        Returns:
            The rows that were found.

        Raises:
            StorageError: The logs cannot be read or mended.
        """
        for name in self._store.logs(FOLDER):
            if _LOG_NAME.fullmatch(name):
                unit = wanted(int(name))
                if unit is None:
                    self._store.delete_log(f"{FOLDER}/{name}")
                else:
                    self._load(unit)
        return self.num_rows

    def find(
        self, unit: Unit, address: RowAddress, prompt_sha256: str, *, params: str = ""
    ) -> RowResult | None:
        """The result that an earlier run had for this very prompt at this very address.

        Args:
            unit: The row's unit.
            address: The row.
            prompt_sha256: Its prompt's digest.
            params: Tells the parameters it is sampled with; they come from the input, which a
                file that changed and was put back may have had otherwise.
        """
        log = self._logs.get(unit)
        return None if log is None else log.found.get((address, prompt_sha256, params))

    def add(self, unit: Unit, address: RowAddress, result: RowResult, *, params: str = "") -> None:
        """Takes a row that finished in this run; it is not in the log before a flush.

        Rows that failed before they had a prompt, timed out or were cancelled are left out: the
        next run has them anew. So are those too long for a frame.
        """
        if not journal_record.is_verdict(result):
            return
        frame = journal_frame.encode(journal_record.encode(address, result, params))
        if frame is None:
            return
        log = self._logs.setdefault(unit, _Log(found={}, buffer=bytearray()))
        log.buffer += frame
        if unit not in self._waiting:
            self._waiting[unit] = self._clock()

    def flush_if_due(self) -> None:
        """Writes if a row waited for `interval`, or if the waiting rows take too much memory.

        Raises:
            StorageError: A log cannot be written.
        """
        if not self._waiting:
            return
        waited = self._clock() - next(iter(self._waiting.values()))
        num_bytes = sum(len(self._logs[unit].buffer) for unit in self._waiting)
        if waited >= self._interval or num_bytes >= _MAX_BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Writes what waits; after an error it waits still, and can be tried again.

        Raises:
            StorageError: A log cannot be written.
        """
        for unit in list(self._waiting):
            self._flush(unit)

    def drop(self, unit: Unit) -> None:
        """Forgets a unit and deletes its log; to be called once the unit is committed.

        Raises:
            StorageError: The log cannot be deleted.
        """
        log = self._logs.pop(unit, None)
        self._waiting.pop(unit, None)
        if log is not None and (log.num_bytes or log.is_torn):
            self._store.delete_log(_name(unit))

    def _load(self, unit: Unit) -> None:
        data = self._store.read_log(_name(unit)) or b""
        frames = journal_frame.read(data)
        head = next(frames, None)
        if head is None or head.value != journal_record.head(unit):
            self._store.delete_log(_name(unit))
            return
        log = _Log(found={}, num_bytes=head.end, buffer=bytearray())
        for frame in frames:
            record = journal_record.decode(frame.value)
            if record is None:
                break
            address, result, params = record
            # Of a row that is there twice, the last counts; either would do.
            log.found[address, result.prompt_sha256, params] = result
            log.num_bytes = frame.end
        if log.num_bytes < len(data):
            self._store.truncate(_name(unit), log.num_bytes)
        self._logs[unit] = log

    def _flush(self, unit: Unit) -> None:
        log = self._logs[unit]
        self._mend(unit, log)
        data = bytes(log.buffer)
        if not log.num_bytes:
            head = journal_frame.encode(journal_record.head(unit))
            assert head is not None, "a head is short"
            data = head + data
        log.is_torn = True
        self._store.append(_name(unit), data)
        log.is_torn = False
        log.num_bytes += len(data)
        log.buffer.clear()
        del self._waiting[unit]

    def _mend(self, unit: Unit, log: _Log) -> None:
        """Cuts off what an append left that failed; behind a torn frame nothing would be read."""
        if log.is_torn and log.num_bytes:
            self._store.truncate(_name(unit), log.num_bytes)
        elif log.is_torn:
            self._store.delete_log(_name(unit))
        log.is_torn = False


def _name(unit: Unit) -> str:
    return f"{FOLDER}/{unit.index:06d}"
