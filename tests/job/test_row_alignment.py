from file_records import file
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.job.input.file_record import FileRecord
from jaxpaged.job.look.row_alignment import Span, align, each_sample


def places(files: list[FileRecord]) -> dict[tuple[str, int, int], int]:
    """By address, the global index."""
    found = {}
    for one in files:
        lengths = [rows for rows, count in one.row_groups for _ in range(count)]
        for group, length in enumerate(lengths):
            for index in range(length):
                found[one.name, group, index] = len(found)
    return found


_RUNS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 2)), max_size=3)
_FILES = st.lists(st.tuples(st.sampled_from("abcd"), _RUNS), max_size=4, unique_by=lambda x: x[0])


@settings(deadline=None)
@given(a=_FILES, b=_FILES)
def test_rows_of_one_address_are_paired_and_every_row_comes_once(a, b):
    a, b = ([file(name, *runs) for name, runs in side] for side in (a, b))
    places_a, places_b = places(a), places(b)
    expected = {(places_a.get(key), places_b.get(key)) for key in places_a.keys() | places_b.keys()}

    pairs = [
        (None if span.a is None else span.a + i, None if span.b is None else span.b + i)
        for span in align(a, b)
        for i in range(span.num_rows)
    ]

    assert len(pairs) == len(set(pairs))
    assert set(pairs) == expected


def test_files_that_follow_one_another_in_both_are_one_span():
    files = [file(f"{i}", (3, 2)) for i in range(5)]

    assert list(align(files, files)) == [Span(a=0, b=0, num_rows=30)]
    assert list(align(files, files[1:])) == [
        Span(a=0, b=None, num_rows=6),
        Span(a=6, b=0, num_rows=24),
    ]
    assert list(align([], files)) == [Span(a=None, b=0, num_rows=30)]


@settings(deadline=None)
@given(a=_FILES, b=_FILES, each_a=st.integers(1, 3), each_b=st.integers(1, 3))
def test_samples_are_paired_by_row_and_number(a, b, each_a, each_b):
    files_a, files_b = ([file(name, *runs) for name, runs in files] for files in (a, b))

    pairs = set()
    for span in each_sample(align(files_a, files_b), each_a, each_b):
        for offset in range(span.num_rows):
            pairs.add(
                tuple(None if start is None else start + offset for start in (span.a, span.b))
            )

    sides = (places(files_a), each_a), (places(files_b), each_b)
    keys = [
        {(address, i): row * each + i for address, row in rows.items() for i in range(each)}
        for rows, each in sides
    ]
    assert pairs == {
        (keys[0].get(key), keys[1].get(key)) for key in keys[0].keys() | keys[1].keys()
    }
