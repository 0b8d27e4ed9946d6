"""A difference of two outputs on the terminal, with the first rows that differ."""

from collections.abc import Iterator

import rich.box
import rich.console
import rich.table
import rich.text

from jaxpaged.job.look.diff import Diff
from jaxpaged.job.look.row_comparison import ChangedRow
from jaxpaged.job.report_table import plain


def show(diff: Diff, console: rich.console.Console) -> None:
    """Prints counts, columns, jobs and the sample."""
    table = rich.table.Table(box=rich.box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _lines(diff):
        table.add_row(rich.text.Text(name), rich.text.Text(value))
    console.print(table)
    if diff.sample:
        console.print(f"The first {len(diff.sample)} rows that differ:", style="bold")
    for row in diff.sample:
        console.print(_row(row), soft_wrap=True)


def _lines(diff: Diff) -> Iterator[tuple[str, str]]:
    yield "a", plain(diff.a, 500)
    yield "b", plain(diff.b, 500)
    yield "same rows", f"{diff.same:,}"
    yield "changed rows", f"{diff.changed:,}"
    for name, count in sorted(diff.columns.items(), key=lambda item: -item[1]):
        yield f"  {plain(name)}", f"{count:,}"
    yield "only in a", f"{diff.only_in_a:,}"
    yield "only in b", f"{diff.only_in_b:,}"
    for side, names in (("a", diff.columns_only_in_a), ("b", diff.columns_only_in_b)):
        if names:
            yield f"columns only in {side}", f"{plain(', '.join(names), 500)} (not compared)"
    for column in diff.retyped:
        how = "compared by value" if column.is_compared else "not comparable: all rows differ"
        yield f"type of {plain(column.name)}", f"{plain(column.a)} -> {plain(column.b)} ({how})"
    for line in diff.jobs:
        yield "job", plain(line, 500)


def _row(row: ChangedRow) -> rich.text.Text:
    text = rich.text.Text(f"{plain(row.file)}, row group {row.row_group}, row {row.index}")
    for cell in row.cells:
        text.append(f"\n  {plain(cell.column)}  ", "dim")
        text.append(plain(cell.a))
        text.append(" -> ", "bold")
        text.append(plain(cell.b))
    return text
