"""Units: the consecutive rows that become one part file, and the stable names of rows.

Pure arithmetic over global row indices; knows nothing of files' contents.
"""

import bisect
import dataclasses
import hashlib
import itertools
from collections.abc import Iterator
from functools import cached_property

from jaxpaged.errors import ConfigError

MAX_UNITS = 1_000_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Rows [start, stop) of the input plan, whatever files and row groups they lie in.

    Attributes:
        index: Its place among the job's units.
        start: The global index of its first row.
        stop: One past its last row.
        revision: The revision of the output folder that makes it; see `history`.
        fingerprint: That revision's fingerprint; "" where nobody asks.
        rows_each: Rows of the part for each row of the input.
    """

    index: int
    start: int
    stop: int
    revision: int = 0
    fingerprint: str = ""
    rows_each: int = 1

    @property
    def num_rows(self) -> int:
        """Rows of the input in the unit."""
        return self.stop - self.start

    @property
    def num_part_rows(self) -> int:
        """Rows of its part."""
        return self.num_rows * self.rows_each

    @property
    def part_name(self) -> str:
        """The name of its part file; names sort in the order of the units."""
        return part_name(self.index)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Rows that came into a job together: its first input, or the files of one extension.

    Attributes:
        num_rows: The rows.
        revision: The revision that brought them.
        fingerprint: That revision's fingerprint.
    """

    num_rows: int
    revision: int = 0
    fingerprint: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Units:
    """All units of a job.

    No unit has rows of two segments, so that the units of a job stay what they are when it is
    extended. A job that began without rows has an empty first unit, so that its output is a table
    all the same.

    Attributes:
        segments: The rows, the job's first input in front.
        rows_per_part: Rows of the input in every unit but the last of a segment.
        rows_each: Rows of a part for each of them.

    Raises:
        ConfigError: There would be more units than part names.
    """

    segments: tuple[Segment, ...]
    rows_per_part: int
    rows_each: int = 1

    def __post_init__(self) -> None:
        if len(self) > MAX_UNITS:
            raise ConfigError(
                f"output.rows_per_part: {self.num_rows:,} rows would make {len(self):,} parts; the "
                f"most is {MAX_UNITS:,}, so write at least {-(-self.num_rows // MAX_UNITS):,}"
            )

    @property
    def num_rows(self) -> int:
        """Rows of all segments."""
        return sum(segment.num_rows for segment in self.segments)

    def __len__(self) -> int:
        return self._first_units[-1]

    def __iter__(self) -> Iterator[Unit]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> Unit:
        if not 0 <= index < len(self):
            raise IndexError(f"unit {index} of {len(self)}")
        at = bisect.bisect_right(self._first_units, index) - 1
        segment, first_row = self.segments[at], self._first_rows[at]
        start = first_row + (index - self._first_units[at]) * self.rows_per_part
        return Unit(
            index=index,
            start=start,
            stop=min(start + self.rows_per_part, first_row + segment.num_rows),
            revision=segment.revision,
            fingerprint=segment.fingerprint,
            rows_each=self.rows_each,
        )

    @cached_property
    def _first_rows(self) -> list[int]:
        """The global index of each segment's first row, and the number of all rows."""
        return [0, *itertools.accumulate(segment.num_rows for segment in self.segments)]

    @cached_property
    def _first_units(self) -> list[int]:
        """The index of each segment's first unit, and the number of all units."""
        counts = [-(-segment.num_rows // self.rows_per_part) for segment in self.segments]
        return [0, *itertools.accumulate([max(1, counts[0]), *counts[1:]])]


def part_name(unit: int) -> str:
    """The name of the part file of the unit with this index."""
    return f"part-{unit:06d}.parquet"


def address_key(*, file: str, row_group: int, index: int) -> int:
    """A stable 64-bit name of a row, for its random numbers."""
    name = f"{file}\0{row_group}\0{index}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
