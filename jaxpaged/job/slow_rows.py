"""The rows of a run that took longest: a few of them, however many there are."""

import dataclasses
import heapq

_MAX_ROWS = 10


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SlowRow:
    """A row by its address, and how long it took.

    Attributes:
        file: Of the address.
        row_group: Of the address.
        index: Of the address.
        seconds: From the moment the engine was given it until it was finished; it also waits in
            this time.
        prompt_tokens: Of its prompt.
        completion_tokens: Of all its completions.
    """

    file: str
    row_group: int
    index: int
    seconds: float
    prompt_tokens: int
    completion_tokens: int


class SlowRows:
    """Keeps the slowest of the rows it is told of.

    Args:
        max_rows: How many it keeps.
    """

    def __init__(self, max_rows: int = _MAX_ROWS) -> None:
        self._max_rows = max_rows
        # The quickest of those kept comes first; of two equal ones the later.
        self._heap: list[tuple[float, int, SlowRow]] = []
        self._num_seen = 0

    def add(self, row: SlowRow) -> None:
        """Takes a row in if it is one of the slowest so far."""
        self._num_seen += 1
        entry = (row.seconds, -self._num_seen, row)
        if len(self._heap) < self._max_rows:
            heapq.heappush(self._heap, entry)
        else:
            heapq.heappushpop(self._heap, entry)

    def slowest(self) -> tuple[SlowRow, ...]:
        """The rows, the slowest first."""
        return tuple(row for _, _, row in sorted(self._heap, key=lambda entry: entry[:2])[::-1])
