import pytest

from jaxpaged.errors import ConfigError
from jaxpaged.job import units
from jaxpaged.job.units import Unit, Units


def test_units_cover_all_rows_once():
    found = list(Units(num_rows=10, rows_per_part=4))

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
    assert list(Units(num_rows=0, rows_per_part=4)) == [Unit(index=0, start=0, stop=0)]


def test_more_parts_than_names_are_refused():
    assert len(Units(num_rows=2_000_000, rows_per_part=2)) == 1_000_000
    with pytest.raises(ConfigError, match=r"would make 1,000,001 parts; .* write at least 3"):
        Units(num_rows=2_000_001, rows_per_part=2)


def test_a_row_s_key_depends_on_its_whole_address():
    def key(file: str, row_group: int, index: int) -> int:
        return units.address_key(file=file, row_group=row_group, index=index)

    keys = {key(f, g, i) for f in ("a", "a1", "b") for g in range(12) for i in range(112)}

    assert len(keys) == 3 * 12 * 112
    assert all(0 <= found < 2**64 for found in keys)
    # Pinned: a change would change every sampled text.
    assert key("rows.parquet", 0, 0) == 9113003535866889677
