import dataclasses
import hashlib
import io
import pathlib

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxpaged.job.output import part_file
from jaxpaged.job.output.part_file import ForeignPart, PartProblem
from jaxpaged.job.units import Unit

SCHEMA = pa.schema([("id", pa.int64()), ("text", pa.large_string()), ("tags", pa.list_(pa.int8()))])
COLUMNS = part_file.columns(SCHEMA)
UNIT = Unit(index=3, start=30, stop=36, revision=1, fingerprint="f" * 64)
TABLE = pa.table(
    {
        "id": range(30, 36),
        "text": [f"text {i}" * 5 for i in range(6)],
        "tags": [[1], None, [], [2, None], [3], [4]],
    },
    schema=SCHEMA,
)


def write(path: pathlib.Path, unit: Unit | None = UNIT, table: pa.Table = TABLE) -> pathlib.Path:
    """A part in two row groups."""
    writer = part_file.open_writer(str(path), table.schema)
    writer.write_table(table.slice(0, 4))
    writer.write_table(table.slice(4))
    if unit is not None:
        part_file.add_metadata(writer, unit, attempt=5)
    writer.close()
    return path


@pytest.fixture
def part(tmp_path) -> pathlib.Path:
    return write(tmp_path / "part")


def check(path: pathlib.Path) -> int:
    with path.open("rb") as file:
        return part_file.check(file, UNIT, COLUMNS)


def revision_of(path: pathlib.Path) -> int | None:
    with path.open("rb") as file:
        return part_file.revision_of(file)


class FailingFile(io.FileIO):
    """A file on a disk that fails."""

    def read(self, size: int | None = -1) -> bytes:
        raise OSError(5, "Input/output error")

    def readinto(self, buffer: object) -> int:
        raise OSError(5, "Input/output error")


def test_a_whole_part_says_who_made_it(part):
    assert check(part) == 5
    assert revision_of(part) == 1
    with part.open("rb") as file:
        assert part_file.sha256(file) == hashlib.sha256(part.read_bytes()).hexdigest()
        assert file.tell() == part.stat().st_size
    assert pq.read_table(part).equals(TABLE)


@pytest.mark.parametrize(
    "change",
    [{"index": 4}, {"start": 29}, {"stop": 37}, {"revision": 0}, {"fingerprint": "e" * 64}],
)
def test_a_part_of_another_unit_revision_or_job_is_foreign(tmp_path, change):
    other = write(tmp_path / "part", dataclasses.replace(UNIT, **change))

    with pytest.raises(ForeignPart, match=r"it says it is unit \d, .* of job [ef]{12}, not unit 3"):
        check(other)


@pytest.mark.parametrize(
    "metadata",
    [{}, {"jaxpaged": "{"}, {"jaxpaged": "[]"}, {"jaxpaged": "1"}, {"jaxpaged": "[" * 100_000}],
    ids=["none", "torn", "list", "number", "deep"],
)
def test_a_table_of_somebody_else_is_foreign(tmp_path, metadata):
    with pq.ParquetWriter(tmp_path / "part", SCHEMA) as writer:
        writer.write_table(TABLE)
        writer.add_key_value_metadata(metadata)

    with pytest.raises(ForeignPart, match=r"it says it is no part of jaxpaged's, not unit 3"):
        check(tmp_path / "part")


@pytest.mark.parametrize("claim", [None, "{", "[]", "1", "{}", '{"revision": "1"}'])
def test_a_table_of_somebody_else_has_no_revision(tmp_path, claim):
    with pq.ParquetWriter(tmp_path / "part", SCHEMA) as writer:
        writer.write_table(TABLE)
        writer.add_key_value_metadata({} if claim is None else {"jaxpaged": claim})

    assert revision_of(tmp_path / "part") is None


@pytest.mark.parametrize("attempt", ["null", '"5"'])
def test_a_part_without_an_attempt_is_foreign(tmp_path, part, attempt):
    claim = pq.read_metadata(part).metadata[b"jaxpaged"].decode()
    with pq.ParquetWriter(tmp_path / "other", SCHEMA) as writer:
        writer.write_table(TABLE)
        changed = claim.replace('"attempt": 5', f'"attempt": {attempt}')
        assert changed != claim
        writer.add_key_value_metadata({"jaxpaged": changed})

    with pytest.raises(ForeignPart):
        check(tmp_path / "other")


def test_a_part_cut_anywhere_does_not_read(part):
    data = part.read_bytes()

    for num_bytes in range(len(data)):
        part.write_bytes(data[:num_bytes])
        with pytest.raises(PartProblem, match=r"it does not read as Parquet: \w"):
            check(part)
        assert revision_of(part) is None


def test_a_byte_that_flips_is_seen_or_changes_nothing(part):
    data = part.read_bytes()
    footer = len(data) - pq.read_metadata(part).serialized_size - 8
    missed = []
    # The magic number in front is not read again.
    for place in range(4, footer):
        flipped = bytearray(data)
        flipped[place] ^= 0x10
        part.write_bytes(flipped)
        try:
            check(part)
        except PartProblem:
            continue
        # Of a page's header, in which little is of use to a reader.
        assert pq.read_table(part).equals(TABLE)
        missed.append(place)
    assert len(missed) < footer // 2


def test_other_columns_are_named(tmp_path):
    renamed = TABLE.rename_columns(["id", "words", "tags"])
    narrow = TABLE.set_column(0, "id", TABLE["id"].cast(pa.int32()))
    swapped = TABLE.select(["text", "id", "tags"])
    nested = TABLE.set_column(2, "tags", TABLE["tags"].cast(pa.list_(pa.int16())))

    for number, table in enumerate([renamed, narrow, swapped, nested, TABLE.select(["id"])]):
        other = write(tmp_path / f"{number}", table=table)
        with pytest.raises(PartProblem, match=r"its columns are .*, not id: int64, text: large_"):
            check(other)


def test_a_row_more_or_less_is_seen(tmp_path):
    for table in (TABLE.slice(1), pa.concat_tables([TABLE, TABLE.slice(0, 1)]), TABLE.slice(0, 0)):
        other = write(tmp_path / "part", table=table)
        with pytest.raises(PartProblem, match=rf"it has {table.num_rows} rows, not 6"):
            check(other)


def test_columns_are_named_as_a_part_reads():
    item = pa.field("item", pa.string())
    schema = pa.schema([("a", pa.list_(item)), ("b", pa.dictionary(pa.int32(), pa.string()))])
    stored = io.BytesIO()
    pq.write_table(schema.empty_table(), stored)

    found = part_file.columns(schema)

    assert found == tuple((f.name, str(f.type)) for f in pq.read_schema(stored))
    assert [name for name, _ in found] == ["a", "b"]


def test_a_disk_that_fails_is_no_damaged_part(part):
    with FailingFile(part) as file, pytest.raises(OSError, match="Input/output error"):
        part_file.check(file, UNIT, COLUMNS)
    with FailingFile(part) as file, pytest.raises(OSError, match="Input/output error"):
        part_file.revision_of(file)
