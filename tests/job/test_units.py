import pytest
from job_output import make_units

from jaxpaged.errors import ConfigError
from jaxpaged.job import units
from jaxpaged.job.units import Segment, Unit, Units


def test_units_cover_all_rows_once():
    found = list(make_units(num_rows=10, rows_per_part=4))

    assert found == [
        Unit(index=0, start=0, stop=4),
        Unit(index=1, start=4, stop=8),
        Unit(index=2, start=8, stop=10),
    ]
    assert [unit.part_name for unit in found] == [
        "part-000000.parquet",
        "part-000001.parquet",
        "part-000002.parquet",
    ]
    assert found[2].num_rows == 2


def test_no_rows_make_one_empty_unit():
    assert list(make_units(num_rows=0, rows_per_part=4)) == [Unit(index=0, start=0, stop=0)]


def test_more_parts_than_names_are_refused():
    assert len(make_units(num_rows=2_000_000, rows_per_part=2)) == 1_000_000
    with pytest.raises(ConfigError, match=r"would make 1,000,001 parts; .* write at least 3"):
        make_units(num_rows=2_000_001, rows_per_part=2)


def test_no_unit_has_rows_of_two_segments():
    units = Units(
        segments=(
            Segment(num_rows=5, fingerprint="a"),
            Segment(num_rows=0, revision=1, fingerprint="b"),
            Segment(num_rows=3, revision=3, fingerprint="c"),
        ),
        rows_per_part=4,
    )

    assert list(units) == [
        Unit(index=0, start=0, stop=4, fingerprint="a"),
        Unit(index=1, start=4, stop=5, fingerprint="a"),
        Unit(index=2, start=5, stop=8, revision=3, fingerprint="c"),
    ]
    assert (len(units), units.num_rows) == (3, 8)
    for index in (-1, 3):
        with pytest.raises(IndexError, match=f"unit {index} of 3"):
            units[index]


def test_an_extended_job_keeps_its_units_and_an_empty_one_its_empty_unit():
    first = Segment(num_rows=0, fingerprint="a")
    added = (
        Segment(num_rows=3, revision=1, fingerprint="b"),
        Segment(num_rows=2, revision=2, fingerprint="c"),
    )

    before = [list(Units(segments=(first, *added[:n]), rows_per_part=2)) for n in range(3)]

    assert before[0] == [Unit(index=0, start=0, stop=0, fingerprint="a")]
    assert [unit.num_rows for unit in before[2]] == [0, 2, 1, 2]
    assert before[2][:3] == before[1]
    assert before[1][:1] == before[0]


def test_a_row_s_key_depends_on_its_whole_address():
    def key(file: str, row_group: int, index: int) -> int:
        return units.address_key(file=file, row_group=row_group, index=index)

    keys = {key(f, g, i) for f in ("a", "a1", "b") for g in range(12) for i in range(112)}

    assert len(keys) == 3 * 12 * 112
    assert all(0 <= found < 2**64 for found in keys)
    # Pinned: a change would change every sampled text.
    assert key("rows.parquet", 0, 0) == 9113003535866889677
