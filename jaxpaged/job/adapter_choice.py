"""Which adapter completes a row: one for all, or the one that a cell names.

Knows names and cells, neither what adapters are nor where they lie.
"""

import dataclasses
from collections.abc import Mapping

from jaxpaged.job.prompt.row_fault import RowFault

BASE_GROUP = "(base)"
"""What rows of the model as it is are counted under; no adapter's name begins like this."""

UNKNOWN_GROUP = "(unknown)"
"""What rows are counted under that name no adapter of the job."""

_SHOWN_CHARS = 40


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdapterChoice:
    """How rows choose.

    Attributes:
        names: The job's adapters.
        fixed: The one for all rows; None if a column chooses.
        column: The column with their names; None if all rows have the same one.
    """

    names: tuple[str, ...]
    fixed: str | None = None
    column: str | None = None

    def of(self, cells: Mapping[str, object]) -> str | None:
        """The adapter of the row with these cells; None for the model as it is.

        Raises:
            RowFault: `unknown_adapter`, with the names there are.
        """
        if self.column is None:
            return self.fixed
        cell = cells[self.column]
        if cell is None or cell == "":
            return None
        if cell not in self.names:
            raise RowFault(
                "unknown_adapter",
                f"column {self.column!r}: no adapter {str(cell)[:_SHOWN_CHARS]!r}; the job has: "
                f"{', '.join(map(repr, self.names))}",
            )
        return str(cell)

    def group(self, cell: object) -> str:
        """What a row is counted under, by its cell; whatever it is where all have the same one."""
        if self.column is None:
            return self.fixed or BASE_GROUP
        if cell is None or cell == "":
            return BASE_GROUP
        return str(cell) if cell in self.names else UNKNOWN_GROUP
