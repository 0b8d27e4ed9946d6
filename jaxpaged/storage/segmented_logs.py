"""Logs where nothing can be appended to: a folder for each, an object for each piece appended.

    journal/000003/00000000    the first bytes of the log journal/000003
    journal/000003/00000001    those that follow

The segments of a log have no gap between their numbers. What lies behind a gap was left by a
removal that was cut short; it is not part of the log, and goes when the log is written next. So
segments can be removed in any order, and at every moment there are the log's first bytes.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from jaxpaged.storage.store import Store

_AT_ONCE = 8

_Result = TypeVar("_Result")


class SegmentedLogs:
    """The logs of a store; see `Store` for the methods.

    Args:
        store: Where their segments are.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._ends: dict[str, int] = {}

    def append(self, name: str, data: bytes) -> None:
        """Creates the log's next segment."""
        end = self._ends.get(name)
        if end is None:
            segments, others = self._find(name)
            self._each(self._store.delete, others)
            end = len(segments)
        while not self._store.create(_segment(name, end), data):
            # Of another writer, or of a try that was given up: it is never overwritten.
            end += 1
        self._ends[name] = end + 1

    def read(self, name: str) -> bytes | None:
        """Joins the log's segments."""
        segments, _ = self._find(name)
        found = self._each(self._store.read, list(segments))
        # Reading does not keep a writer from removing them meanwhile.
        whole = found[: found.index(None)] if None in found else found
        return b"".join(data for data in whole if data is not None) if whole else None

    def truncate(self, name: str, num_bytes: int) -> None:
        """Removes the segments behind the cut, then shortens the one it goes through."""
        segments, others = self._find(name)
        last, begin, end = None, 0, 0
        for segment, size in segments.items():
            if last is None or end < num_bytes:
                last, begin = segment, end
                end += size
            else:
                others.append(segment)
        self._each(self._store.delete, others)
        self._ends.pop(name, None)
        if last is not None and end > num_bytes:
            kept = self._store.read(last) or b""
            self._store.replace(last, kept[: num_bytes - begin])

    def delete(self, name: str) -> None:
        """Removes the log's segments."""
        segments, others = self._find(name)
        self._each(self._store.delete, [*segments, *others])
        self._ends.pop(name, None)

    def names(self, folder: str) -> list[str]:
        """The folders in a folder."""
        return [name for name, size in self._store.entries(folder).items() if size is None]

    def _find(self, name: str) -> tuple[dict[str, int], list[str]]:
        """The bytes of a log's segments by name, in order, and what else lies in its folder."""
        found = {f"{name}/{entry}": size for entry, size in self._store.entries(name).items()}
        segments: dict[str, int] = {}
        while (size := found.pop(_segment(name, len(segments)), None)) is not None:
            segments[_segment(name, len(segments))] = size
        return segments, [other for other, size in found.items() if size is not None]

    def _each(self, call: Callable[[str], _Result], names: Sequence[str]) -> list[_Result]:
        # One after the other, the hundreds of segments of a long log would keep the writer waiting.
        with ThreadPoolExecutor(max_workers=_AT_ONCE) as threads:
            return list(threads.map(call, names))


def _segment(name: str, number: int) -> str:
    return f"{name}/{number:08d}"
