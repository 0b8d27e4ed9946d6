"""What differs between two outputs, row by row: rows are the same row if they have one address.

Where each completion of a row is a row of the output, they must be the same sample too.

Reads both in bounded memory, changes nothing, and needs neither job file nor input nor model.
"""

import dataclasses
from typing import Any

import pyarrow as pa

from jaxpaged.job.look import job_difference, known_job, row_alignment
from jaxpaged.job.look.folder_rows import FolderRows, Rows
from jaxpaged.job.look.row_alignment import Span
from jaxpaged.job.look.row_comparison import ChangedRow, RetypedColumn, RowComparison
from jaxpaged.storage.store import Store


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Diff:
    """What differs between two outputs, "a" and "b".

    Attributes:
        a: Where the first output lies.
        b: Where the second one lies.
        same: Rows that are the same in all columns that both outputs have.
        changed: Rows that are not.
        only_in_a: Rows that only the first output has.
        only_in_b: Rows that only the second one has.
        columns: The rows in which a column differs, by column; columns without any are left out.
        columns_only_in_a: Columns that are not compared, because only the first output has them.
        columns_only_in_b: The same for the second one.
        retyped: Columns whose types differ.
        jobs: What differs between the two jobs, a line each: what it is in the first one, and in
            the second.
        sample: The first rows that differ.
    """

    a: str
    b: str
    same: int
    changed: int
    only_in_a: int
    only_in_b: int
    columns: dict[str, int]
    columns_only_in_a: tuple[str, ...]
    columns_only_in_b: tuple[str, ...]
    retyped: tuple[RetypedColumn, ...]
    jobs: tuple[str, ...]
    sample: tuple[ChangedRow, ...]

    @property
    def is_same(self) -> bool:
        """Whether both have the same rows with the same cells in the same columns."""
        columns = self.columns_only_in_a or self.columns_only_in_b
        return not (self.changed or self.only_in_a or self.only_in_b or columns)

    @property
    def exit_code(self) -> int:
        """0 if they are the same, 1 if not."""
        return 0 if self.is_same else 1

    def to_json(self, *, has_cells: bool = False) -> dict[str, Any]:
        """`is_same` and the attributes in JSON's types.

        A row of the sample is its address and the names of the `columns` that differ; no row text
        gets into logs that way.

        Args:
            has_cells: Rows of the sample have `cells` instead, a list of column, a and b.
        """
        values = {"is_same": self.is_same, **dataclasses.asdict(self)}
        if not has_cells:
            for row in values["sample"]:
                row["columns"] = [cell["column"] for cell in row.pop("cells")]
        return values


def diff(a: Store, b: Store) -> Diff:
    """Compares two outputs, finished or not.

    Raises:
        OutputConflictError: One of them is no output of jaxpaged's, or is damaged.
        StorageError: One of them cannot be read.
    """
    known_a, known_b = known_job.read(a), known_job.read(b)
    found = RowComparison(known_a.job.schema, known_b.job.schema)
    with FolderRows(a, known_a) as rows_a, FolderRows(b, known_b) as rows_b:
        spans = row_alignment.align(known_a.files, known_b.files)
        each_a, each_b = rows_a.rows_each, rows_b.rows_each
        for span in row_alignment.each_sample(spans, each_a, each_b):
            _compare(span, rows_a, rows_b, found=found)
    names_a, names_b = ([name for name, _ in known.job.schema] for known in (known_a, known_b))
    return Diff(
        a=a.url,
        b=b.url,
        same=found.same,
        changed=found.changed,
        only_in_a=found.only_in_a,
        only_in_b=found.only_in_b,
        columns={name: count for name, count in found.columns.items() if count},
        columns_only_in_a=tuple(name for name in names_a if name not in names_b),
        columns_only_in_b=tuple(name for name in names_b if name not in names_a),
        retyped=tuple(found.retyped()),
        jobs=tuple(job_difference.differences(known_a, known_b)),
        sample=tuple(found.sample),
    )


def _compare(span: Span, a: FolderRows, b: FolderRows, *, found: RowComparison) -> None:
    done = 0
    while done < span.num_rows:
        left = span.num_rows - done
        sides = [
            None if start is None else rows.at(start + done, left)
            for rows, start in ((a, span.a), (b, span.b))
        ]
        num_rows = min(rows.num_rows for rows in sides if rows is not None)
        found.add(*(_first(rows, num_rows) for rows in sides))
        done += num_rows


def _first(rows: Rows | None, num_rows: int) -> pa.RecordBatch | None:
    return None if rows is None or rows.cells is None else rows.cells.slice(0, num_rows)
