"""Which rows of two jobs have the same address, as spans of global indices.

A job's rows lie file by file, row group by row group, so that what two jobs share is found by
arithmetic, whatever the order of their files. Knows no cells.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

from jaxpaged.job.input.file_record import FileRecord


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Consecutive rows.

    Attributes:
        a: The global index of the first one in the first job; None if they are not there.
        b: The same in the second job.
        num_rows: The rows.
    """

    a: int | None
    b: int | None
    num_rows: int


def align(a: Sequence[FileRecord], b: Sequence[FileRecord]) -> Iterator[Span]:
    """The rows of both jobs, those of the first one in its order, then what only the second has."""
    return _joined(span for span in _spans(a, b) if span.num_rows)


def each_sample(spans: Iterable[Span], a: int, b: int) -> Iterator[Span]:
    """The same spans in rows of two outputs that have `a` and `b` rows for each row of the input.

    Rows are at the same place if they are the same sample of the same row.
    """
    for span in spans:
        if a == b or span.a is None or span.b is None:
            each = b if span.a is None else a
            first_a, first_b = (
                None if start is None else start * each for start in (span.a, span.b)
            )
            yield _span(first_a, first_b, span.num_rows * each)
            continue
        shared = min(a, b)
        for row in range(span.num_rows):
            first_a, first_b = (span.a + row) * a, (span.b + row) * b
            yield _span(first_a, first_b, shared)
            if a > b:
                yield _span(first_a + shared, None, a - shared)
            else:
                yield _span(None, first_b + shared, b - shared)


def _span(a: int | None, b: int | None, num_rows: int) -> Span:
    return Span(a=a, b=b, num_rows=num_rows)


def _spans(a: Sequence[FileRecord], b: Sequence[FileRecord]) -> Iterator[Span]:
    others = {file.name: (start, file) for start, file in _starts(b)}
    for start, file in _starts(a):
        other = others.pop(file.name, None)
        if other is None:
            yield Span(a=start, b=None, num_rows=file.num_rows)
        elif file.row_groups == other[1].row_groups:
            yield Span(a=start, b=other[0], num_rows=file.num_rows)
        else:
            yield from _align_groups(start, file, other[0], other=other[1])
    for start, file in others.values():
        yield Span(a=None, b=start, num_rows=file.num_rows)


def _align_groups(a: int, file: FileRecord, b: int, *, other: FileRecord) -> Iterator[Span]:
    """Row group by row group, for a file that is not the same in both jobs."""
    for mine, theirs in itertools.zip_longest(_lengths(file), _lengths(other), fillvalue=0):
        shared = min(mine, theirs)
        yield Span(a=a, b=b, num_rows=shared)
        yield Span(a=a + shared, b=None, num_rows=mine - shared)
        yield Span(a=None, b=b + shared, num_rows=theirs - shared)
        a, b = a + mine, b + theirs


def _joined(spans: Iterable[Span]) -> Iterator[Span]:
    """Spans that continue one another as one, so that many small files are read as one."""
    last: Span | None = None
    for span in spans:
        if last is not None and _continues(last, span):
            last = dataclasses.replace(last, num_rows=last.num_rows + span.num_rows)
            continue
        if last is not None:
            yield last
        last = span
    if last is not None:
        yield last


def _continues(last: Span, span: Span) -> bool:
    return all(
        old is new is None or (old is not None and new == old + last.num_rows)
        for old, new in ((last.a, span.a), (last.b, span.b))
    )


def _starts(files: Sequence[FileRecord]) -> Iterator[tuple[int, FileRecord]]:
    start = 0
    for file in files:
        yield start, file
        start += file.num_rows


def _lengths(file: FileRecord) -> Iterator[int]:
    return (rows for rows, count in file.row_groups for _ in range(count))
