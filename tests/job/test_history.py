import dataclasses
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from jaxpaged.errors import OutputConflictError
from jaxpaged.job.input.file_record import FileRecord
from jaxpaged.job.output import history
from jaxpaged.job.output.history import History, JobRecord
from jaxpaged.job.output.output_view import PRIVATE
from jaxpaged.job.units import Segment
from jaxpaged.storage.local_store import LocalStore

KEYS = {"seed": 7, "sampling.temperature": 0.1, "sampling.stop": ["ü", "\n"], "eval.by": None}


def file_record(name: str, **changes: object) -> FileRecord:
    record = FileRecord(
        name=name,
        bytes=100,
        content=f"sha256:{'a' * 64}",
        footer="b" * 64,
        row_groups=((4, 2), (1, 1)),
        modified="2026-01-01T00:00:00Z",
        stamp="stamp",
        hashed_at=5,
    )
    values: dict[str, Any] = changes
    return dataclasses.replace(record, **values)


def job_record(**changes: object) -> JobRecord:
    content: dict[str, Any] = {
        "result_keys": KEYS,
        "run_keys": {"max_errors": "5%"},
        "model": {"weights": "abc"},
        "files": [file_record("a"), file_record("b")],
        "schema": [("id", "int64")],
    }
    content.update(changes)
    return history.job_record(**content)


@pytest.fixture
def long() -> History:
    """A job that was extended, retried, and extended again."""
    known = History(job=job_record())
    known = known.followed_by(known.extension([file_record("c")]))
    known = known.followed_by(
        known.retry(
            where="completion = 'ß'",
            settings={"sampling.max_tokens": 9, "sampling.stop": ["x"], "engine.dtype": None},
            units=[0, 2],
            rows=3,
        )
    )
    return known.followed_by(known.extension([file_record("d"), file_record("e")]))


@pytest.fixture
def store(tmp_path) -> Iterator[LocalStore]:
    """An empty folder that this process may write to."""
    made = LocalStore(tmp_path, private=PRIVATE, durability="process")
    assert made.lock()
    yield made
    made.unlock()


@pytest.fixture
def stored(store, long) -> pathlib.Path:
    """A folder that remembers the long history."""
    for record in (long.job, *long.revisions):
        name = history.JOB if isinstance(record, JobRecord) else record.name
        assert store.create(name, history.to_bytes(record))
    return store.path


def change(path: pathlib.Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_nothing_is_remembered_where_no_job_began(store):
    assert history.read(store) is None


def test_what_was_written_is_read_again(stored, store, long):
    assert sorted(path.name for path in (stored / history.REVISIONS).iterdir()) == [
        "000001.json",
        "000002.json",
        "000003.json",
    ]
    (stored / history.REVISIONS / "notes.txt").write_text("no revision")

    assert history.read(store) == long


def test_a_history_knows_its_rows_by_the_revision_that_brought_them(long):
    assert [file.name for file in long.files] == ["a", "b", "c", "d", "e"]
    assert long.segments == (
        Segment(num_rows=18, fingerprint=long.job.fingerprint),
        Segment(num_rows=9, revision=1, fingerprint=long.revisions[0].fingerprint),
        Segment(num_rows=18, revision=3, fingerprint=long.revisions[2].fingerprint),
    )
    assert [revision.number for revision in long.retries] == [2]


def test_each_revision_names_the_one_before_it(long):
    fingerprints = [long.job.fingerprint, *(r.fingerprint for r in long.revisions)]

    assert [revision.parent for revision in long.revisions] == fingerprints[:-1]
    assert len(set(fingerprints)) == 4
    assert long.fingerprint == fingerprints[-1]
    assert History(job=long.job).fingerprint == long.job.fingerprint


@pytest.mark.parametrize(
    "changes",
    [
        {"result_keys": KEYS | {"seed": 8}},
        {"result_keys": KEYS | {"sampling.temperature": 0.1 + 1e-16}},
        {"model": {"weights": "abd"}},
        {"files": [file_record("a")]},
        {"files": [file_record("b"), file_record("a")]},
        {"files": [file_record("a"), file_record("b", content=f"sha256:{'c' * 64}")]},
        {"files": [file_record("a"), file_record("b", footer="c" * 64)]},
        {"files": [file_record("a"), file_record("b", row_groups=((3, 3),))]},
    ],
    ids=["seed", "float", "model", "fewer", "order", "content", "footer", "row groups"],
)
def test_what_decides_the_rows_decides_the_fingerprint(changes):
    assert job_record(**changes).fingerprint != job_record().fingerprint


@pytest.mark.parametrize(
    "changes",
    [
        {"run_keys": {}},
        {"result_keys": dict(reversed(KEYS.items()))},
        {"files": [file_record("a", modified="later", stamp="x", hashed_at=9), file_record("b")]},
    ],
    ids=["run keys", "order of keys", "touched"],
)
def test_nothing_else_decides_the_fingerprint(changes):
    assert job_record(**changes).fingerprint == job_record().fingerprint


def test_revisions_that_differ_have_other_fingerprints(long):
    def retry(**changes) -> str:
        values: dict[str, Any] = {"where": "a = 1", "settings": {}, "units": [1], "rows": 1}
        return long.retry(**values | changes).fingerprint

    extended = long.extension([file_record("x")]).fingerprint
    touched = long.extension([file_record("x", modified="later", stamp="y")]).fingerprint

    assert touched == extended
    assert len({extended, long.extension([file_record("y")]).fingerprint, retry()}) == 3
    assert len({retry(), retry(where="a = 2"), retry(settings={"seed": 1}), retry(units=[2])}) == 4
    # The same change of another history is another one.
    assert History(job=job_record(model={})).extension([file_record("x")]).fingerprint != extended


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("job.json", b"", r"job.json cannot be used \(it is no JSON object\)"),
        ("job.json", b"{", r"job.json cannot be used \(it is no JSON object\)"),
        ("job.json", b"[1]", r"job.json cannot be used \(it is no JSON object\)"),
        ("job.json", b"\xff\xfe\x00", r"job.json cannot be used \(it is no JSON object\)"),
        ("job.json", b"[" * 100_000, r"job.json cannot be used \(it is no JSON object\)"),
        ("job.json", b"{}", r"of format None, this version of jaxpaged reads format 2; choose"),
        ("job.json", b'{"format": 1}', r"is of format 1, this version .* reads format 2"),
        ("job.json", b'{"format": 2}', r"job.json cannot be used \(result_keys: Field required\)"),
        ("revisions/000002.json", b"", r"000002.json cannot be used \(it is no JSON object\)"),
        ("revisions/000002.json", b"{}", r"000002.json cannot be used \(number: Field required\)"),
    ],
)
def test_a_record_that_makes_no_sense_is_refused(stored, store, name, content, reason):
    (stored / PRIVATE / name).write_bytes(content)

    with pytest.raises(OutputConflictError, match=reason) as caught:
        history.read(store)
    assert caught.value.exit_code == 6
    assert "choose another output.path" in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        {"input": [{"name": "a"}]},
        {"result_keys": []},
        {"model": {"a": 1}},
        {"fingerprint": None},
        {"created": "yesterday"},
    ],
)
def test_a_value_of_a_wrong_kind_is_named(stored, store, values):
    change(stored / history.JOB, **values)

    [key] = values
    with pytest.raises(OutputConflictError, match=rf"job.json cannot be used \({key}\b"):
        history.read(store)


def test_a_broken_chain_is_refused(stored, store, long):
    revisions = stored / history.REVISIONS
    second = (revisions / "000002.json").read_bytes()
    problem = "cannot be used (it does not follow the revision before it)"

    (revisions / "000002.json").unlink()
    with pytest.raises(OutputConflictError) as gap:
        history.read(store)
    (revisions / "000002.json").write_bytes(second)
    change(revisions / "000002.json", parent="f" * 64)
    with pytest.raises(OutputConflictError) as parent:
        history.read(store)
    (revisions / "000002.json").write_bytes(second)
    (revisions / "000001.json").write_bytes(second)
    with pytest.raises(OutputConflictError) as renamed:
        history.read(store)

    assert f"000003.json {problem}" in str(gap.value)
    assert f"000002.json {problem}" in str(parent.value)
    assert f"000001.json {problem}" in str(renamed.value)
    (revisions / "000001.json").write_bytes(history.to_bytes(long.revisions[0]))
    assert history.read(store) == long


def test_another_job_s_record_under_the_revisions_is_refused(stored, store):
    (stored / history.JOB).write_bytes(history.to_bytes(job_record(model={"weights": "other"})))

    with pytest.raises(OutputConflictError, match=r"000001.json cannot be used"):
        history.read(store)
