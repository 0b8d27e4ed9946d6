import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest

from jaxpaged.errors import OutputConflictError
from jaxpaged.job.output import commit
from jaxpaged.job.output.commit import CommitRecord
from jaxpaged.job.output.output_view import PRIVATE
from jaxpaged.job.tally import Counts, GroupScore, RowError
from jaxpaged.job.units import Unit
from jaxpaged.storage.local_store import LocalStore

UNIT = Unit(index=7, start=14, stop=16, revision=2, fingerprint="f")
RECORD = CommitRecord(
    unit=7,
    start=14,
    stop=16,
    revision=2,
    fingerprint="f",
    attempt=3,
    num_bytes=1000,
    sha256="5" * 64,
    counts=Counts(
        rows=2,
        finish_reasons={"stop": 1, "error": 1},
        tokens={"prompt": 9, "completion": 2, "cached": 0},
        partial_characters=1,
        errors={"bad_type": 1},
        examples={"bad_type": (RowError(file="ä", row_group=0, index=5, message=None),)},
        scores=(
            GroupScore(metric="contains", group=None, correct=1, scored=2),
            GroupScore(metric="contains", group="x", correct=0, scored=1),
        ),
    ),
    committed="2026-01-01T00:00:00+00:00",
)


@pytest.fixture
def store(tmp_path) -> Iterator[LocalStore]:
    """An empty folder that this process may write to."""
    made = LocalStore(tmp_path, private=PRIVATE, durability="process")
    assert made.lock()
    yield made
    made.unlock()


@pytest.mark.parametrize("adopted_by", [None, 4])
def test_what_was_written_is_read_again(store, adopted_by):
    record = dataclasses.replace(RECORD, adopted_by=adopted_by)

    assert store.create(record.name, record.to_bytes())

    assert record.name == "_jaxpaged/commits/000007-r2.json"
    assert commit.read(store, 7, 2) == record


def test_a_record_is_of_one_unit_of_one_revision_of_one_job():
    assert RECORD.is_of(UNIT)
    changes: tuple[dict[str, Any], ...] = (
        {"index": 8},
        {"start": 13},
        {"stop": 17},
        {"revision": 1},
        {"fingerprint": "g"},
    )
    for change in changes:
        assert not RECORD.is_of(dataclasses.replace(UNIT, **change))


def test_records_are_found_by_their_names(store):
    assert commit.committed(store) == {}
    names = ("000012-r10", "000012-r9", "000000-r0", "000012-r0", "999999-r0")
    for name in names:
        assert store.create(f"{commit.FOLDER}/{name}.json", b"not even read")
    for name in ("000001.json", "1-r0.json", "000001-r0.json.tmp", "000001-r.json", "x"):
        assert store.create(f"{commit.FOLDER}/{name}", b"")

    assert commit.committed(store) == {0: (0,), 12: (0, 9, 10), 999999: (0,)}


@pytest.mark.parametrize(
    "content",
    [
        None,
        b"",
        RECORD.to_bytes()[:-30],
        b"[]",
        b"null",
        b"[" * 100_000,
        b"\xff",
        RECORD.to_bytes().replace(b'"sha256"', b'"sha"'),
        RECORD.to_bytes().replace(b'"num_bytes": 1000', b'"num_bytes": "many"'),
        json.dumps(dataclasses.asdict(RECORD) | {"counts": {}}).encode(),
    ],
    ids=[
        *("missing", "empty", "torn", "list", "null", "deep", "bytes"),
        *("key missing", "no number", "no counts"),
    ],
)
def test_a_record_that_makes_no_sense_is_refused_with_a_remedy(store, content):
    if content is not None:
        assert store.create(RECORD.name, content)

    with pytest.raises(OutputConflictError) as caught:
        commit.read(store, 7, 2)

    assert caught.value.exit_code == 6
    assert f"{store.path}/_jaxpaged/commits/000007-r2.json is no commit" in str(caught.value)
    assert "`jaxpaged run JOB --repair` mends it" in str(caught.value)
