"""Units: the consecutive rows that become one part file, and the stable names of rows.

Pure arithmetic over global row indices; knows nothing of files' contents.
"""

import dataclasses
import hashlib
from collections.abc import Iterator

from jaxpaged.errors import ConfigError

MAX_UNITS = 1_000_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Rows [start, stop) of the input plan, whatever files and row groups they lie in.

    Attributes:
        index: Its place among the job's units.
        start: The global index of its first row.
        stop: One past its last row.
    """

    index: int
    start: int
    stop: int

    @property
    def num_rows(self) -> int:
        """Rows of the unit."""
        return self.stop - self.start

    @property
    def part_name(self) -> str:
        """The name of its part file; names sort in the order of the units."""
        return f"part-{self.index:06d}.parquet"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """All units of a job.

    A job without rows has one empty unit, so that its output is a table all the same.

    Attributes:
        num_rows: Rows of the input.
        rows_per_part: Rows of every unit but the last.

    Raises:
        ConfigError: There would be more units than part names.
    """

    num_rows: int
    rows_per_part: int

    def __post_init__(self) -> None:
        if len(self) > MAX_UNITS:
            raise ConfigError(
                f"output.rows_per_part: {self.num_rows:,} rows would make {len(self):,} parts; the "
                f"most is {MAX_UNITS:,}, so write at least {-(-self.num_rows // MAX_UNITS):,}"
            )

    def __len__(self) -> int:
        return max(1, -(-self.num_rows // self.rows_per_part))

    def __iter__(self) -> Iterator[Unit]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> Unit:
        start = index * self.rows_per_part
        stop = min(start + self.rows_per_part, self.num_rows)
        return Unit(index=index, start=start, stop=stop)

    def at(self, row: int) -> Unit:
        """The unit that holds the row with this global index."""
        return self[row // self.rows_per_part]


def address_key(*, file: str, row_group: int, index: int) -> int:
    """A stable 64-bit name of a row, for its random numbers."""
    name = f"{file}\0{row_group}\0{index}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
