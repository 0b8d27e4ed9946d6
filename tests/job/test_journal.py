import dataclasses
import errno
import pathlib
import tempfile
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.errors import StorageError
from jaxpaged.job.output import journal_frame, journal_record
from jaxpaged.job.output.journal import Journal
from jaxpaged.job.output.journal_record import RowAddress
from jaxpaged.job.row_window import RowResult, SampleResult
from jaxpaged.job.token_logprobs import TokenLogprobs
from jaxpaged.job.units import Unit
from jaxpaged.request import TokenLogprob
from jaxpaged.storage.disk import Disk
from jaxpaged.storage.local_store import LocalStore

UNIT = Unit(index=3, start=30, stop=40, revision=1, fingerprint="f00")
LOG = "_jaxpaged/journal/000003"
DIGEST = "d" * 64


def local_store(path: pathlib.Path, disk: Disk | None = None) -> LocalStore:
    return LocalStore(path, private="_jaxpaged", durability="process", disk=disk)


@pytest.fixture
def store(tmp_path) -> LocalStore:
    return local_store(tmp_path / "out")


def opened(store: LocalStore, *units: Unit, interval: float = 0.0) -> Journal:
    """A new run's journal; the units are still to be made."""
    journal = Journal(store, interval=interval)
    journal.load({unit.index: unit for unit in units or (UNIT,)}.get)
    return journal


def address(index: int, file: str = "a.parquet", row_group: int = 0) -> RowAddress:
    return RowAddress(file=file, row_group=row_group, index=index)


def sample(text: str, **fields) -> SampleResult:
    return SampleResult(
        **({"text": text, "finish_reason": "stop", "completion_tokens": 2} | fields)
    )


def result(*texts: str, stop_reason: str | None = None, **fields) -> RowResult:
    samples = tuple(sample(text, stop_reason=stop_reason) for text in texts or ("text",))
    values = {"samples": samples, "prompt_tokens": 4, "seed": 0, "prompt_sha256": DIGEST}
    return RowResult(**(values | fields))


def failed(code: str) -> RowResult:
    return result(samples=(), error_code=code, error_message="why")


def write(store: LocalStore, *results: RowResult, unit: Unit = UNIT) -> None:
    """A run that finishes these rows, indices 0, 1 ..., and is killed."""
    journal = opened(store, unit)
    for index, row in enumerate(results):
        journal.add(unit, address(index), row)
    journal.flush()


def found(journal: Journal, unit: Unit = UNIT, num_rows: int = 10) -> dict[int, str | None]:
    """The completions that are found, by the row's index."""
    rows = {index: journal.find(unit, address(index), DIGEST) for index in range(num_rows)}
    return {
        index: row.samples[0].text if row.samples else None
        for index, row in rows.items()
        if row is not None
    }


def read(store: LocalStore) -> bytes:
    data = store.read_log(LOG)
    assert data is not None
    return data


def put(store: LocalStore, data: bytes, name: str = LOG) -> None:
    store.delete_log(name)
    store.append(name, data)


def frame(value: object) -> bytes:
    data = journal_frame.encode(value)
    assert data is not None
    return data


def test_the_next_run_finds_the_rows_that_were_flushed(store):
    journal = opened(store)
    journal.add(UNIT, address(0), result("zero"))
    journal.add(UNIT, address(1), failed("kv_capacity"))
    journal.flush()
    journal.add(UNIT, address(2), result("lost"))

    after = opened(store)

    assert after.num_rows == 2
    assert found(after) == {0: "zero", 1: None}
    assert after.find(UNIT, address(1), DIGEST) == failed("kv_capacity")


def test_a_row_is_told_by_all_of_its_address_and_its_prompt(store):
    other = Unit(index=4, start=40, stop=50)
    journal = opened(store)
    journal.add(UNIT, address(7), result("a, 0, 7"))
    journal.add(UNIT, address(8), result("a, 0, 8"))
    journal.add(UNIT, address(7, row_group=1), result("a, 1, 7"))
    journal.add(UNIT, address(7, file="b.parquet"), result("b, 0, 7"))
    journal.flush()

    after = opened(store, UNIT, other)

    assert found(after) == {7: "a, 0, 7", 8: "a, 0, 8"}
    assert after.find(UNIT, address(7, row_group=1), DIGEST) == result("a, 1, 7")
    assert after.find(UNIT, address(7, file="b.parquet"), DIGEST) == result("b, 0, 7")
    assert after.find(UNIT, address(7), "e" * 64) is None
    assert found(after, other) == {}
    assert found(after, dataclasses.replace(UNIT, revision=2)) == {}


def test_a_run_adds_to_the_log_of_the_one_before(store):
    write(store, result("zero"))
    journal = opened(store)
    journal.add(UNIT, address(1), result("one"))
    journal.flush()
    journal.add(UNIT, address(2), result("two"))
    journal.flush()

    assert found(opened(store)) == {0: "zero", 1: "one", 2: "two"}


def test_of_a_row_that_is_there_twice_the_last_counts(store):
    write(store, result("first"), result("other"))
    journal = opened(store)
    journal.add(UNIT, address(0), result("second"))
    journal.flush()

    after = opened(store)

    assert (found(after), after.num_rows) == ({0: "second", 1: "other"}, 2)


def record_ends(data: bytes) -> list[int]:
    """Where the head and each record end."""
    return [frame.end for frame in journal_frame.read(data)]


def test_a_log_cut_anywhere_has_the_records_in_front_of_the_cut(store):
    texts = ["zero", "one", "zwei \0 🦋", "\ud83d\ude00"]
    write(store, *(result(text) for text in texts))
    whole = read(store)
    ends = record_ends(whole)

    for num_bytes in range(ends[2], len(whole) + 1):
        put(store, whole[:num_bytes])
        journal = opened(store)

        num_whole = sum(end <= num_bytes for end in ends[1:])
        assert found(journal) == dict(enumerate(texts[:num_whole]))
        assert read(store) == whole[: ends[num_whole]]

        journal.add(UNIT, address(9), result("new"))
        journal.flush()
        assert found(opened(store)) == dict(enumerate(texts[:num_whole])) | {9: "new"}


def test_a_log_with_a_wrong_byte_anywhere_has_the_records_in_front_of_it(store):
    texts = ["zero", "one", "two", "three"]
    write(store, *(result(text) for text in texts))
    whole = read(store)
    ends = record_ends(whole)

    for place in range(ends[2], len(whole)):
        for mask in (0x01, 0x80, 0xFF):
            put(store, whole[:place] + bytes([whole[place] ^ mask]) + whole[place + 1 :])
            journal = opened(store)

            num_whole = sum(end <= place for end in ends[1:])
            assert found(journal) == dict(enumerate(texts[:num_whole]))
            assert read(store) == whole[: ends[num_whole]]


def test_a_head_cut_or_wrong_anywhere_costs_the_log_and_no_more(store):
    write(store, result("zero"))
    whole = read(store)
    end = record_ends(whole)[0]
    cuts = [whole[:place] for place in range(end)]
    flips = [whole[:i] + bytes([whole[i] ^ 0x10]) + whole[i + 1 :] for i in range(end)]

    for data in cuts + flips:
        put(store, data)
        journal = opened(store)
        assert (found(journal), store.read_log(LOG)) == ({}, None)
        journal.add(UNIT, address(1), result("one"))
        journal.flush()
        assert found(opened(store)) == {1: "one"}


@pytest.mark.parametrize(
    "data",
    [b"", b"\0" * 4096, b"PAR1" * 99, b"\xff" * 99, b'{"format":1}\n', frame([]), frame(None)],
)
def test_a_file_that_is_no_log_of_ours_is_deleted(store, data):
    put(store, data)

    assert opened(store).num_rows == 0
    assert store.read_log(LOG) is None


@pytest.mark.parametrize(
    "change",
    [{"fingerprint": "f01"}, {"start": 29}, {"stop": 41}, {"revision": 2}, {"index": 4}],
)
def test_a_log_of_another_unit_is_deleted_whatever_its_name(store, change):
    other = dataclasses.replace(UNIT, **change)
    write(store, result("other"), unit=other)
    if "index" in change:
        put(store, store.read_log("_jaxpaged/journal/000004") or b"")
        store.delete_log("_jaxpaged/journal/000004")

    journal = opened(store)

    assert (journal.num_rows, store.logs("_jaxpaged/journal")) == (0, [])
    assert found(journal) == found(journal, other) == {}


def test_a_log_of_another_format_is_deleted(store):
    write(store, result())
    head = journal_record.head(UNIT)
    put(store, frame(head | {"format": head["format"] + 1}) + read(store)[len(frame(head)) :])

    assert opened(store).num_rows == 0
    assert store.read_log(LOG) is None


def test_only_logs_of_wanted_units_stay(store):
    units = [Unit(index=index, start=index, stop=index + 1) for index in (0, 7, 999_999)]
    before = opened(store, *units)
    for unit in units:
        before.add(unit, address(0), result(f"of {unit.index}"))
    before.flush()
    others = {"notes.txt", "0000007", "00000\u0667"}
    for name in others:
        put(store, b"not ours", f"_jaxpaged/journal/{name}")
    asked = []

    def wanted(index: int) -> Unit | None:
        asked.append(index)
        return units[1] if index == 7 else None

    journal = Journal(store, interval=0.0)

    assert journal.load(wanted) == 1
    assert asked == [0, 7, 999_999]
    assert found(journal, units[1]) == {0: "of 7"}
    assert set(store.logs("_jaxpaged/journal")) == {"000007", *others}


SCORED = TokenLogprobs.pack(
    [
        TokenLogprob(token_id=7, logprob=None, rank=None),
        TokenLogprob(token_id=8, logprob=-0.25, rank=3, top=((5, -0.1), (6, float("-inf")))),
    ]
)
VALID = journal_record.encode(
    address(1),
    result(
        samples=(sample("valid", logprobs=SCORED, cumulative_logprob=-0.25), sample("too")),
        prompt_logprobs=SCORED,
    ),
    "",
)


def with_result(**change) -> dict:
    return VALID | {"result": VALID["result"] | change}


def with_sample(**change) -> dict:
    first, *others = VALID["result"]["samples"]
    return with_result(samples=[first | change, *others])


def with_logprobs(**change) -> dict:
    return with_sample(logprobs=SCORED.to_json() | change)


def with_row(**change) -> dict:
    return VALID | {"row": VALID["row"] | change}


@pytest.mark.parametrize(
    "record",
    [
        None,
        [],
        {},
        journal_record.head(UNIT),
        VALID | {"more": 1},
        VALID | {"sample": 0},
        VALID | {"row": ["a.parquet", 0, 1]},
        VALID | {"result": None},
        with_row(index=-1),
        with_row(index=True),
        with_row(index="1"),
        with_row(index=2**63),
        with_row(row_group=2**31),
        with_row(row_group=1.0),
        with_row(file=None),
        with_row(more=1),
        with_result(more=1),
        with_result(samples=[]),
        with_result(samples=None),
        with_result(samples={}),
        with_result(samples=[None]),
        with_result(error_code="kv_capacity"),
        with_result(samples=[], error_code="no_such_code"),
        with_result(samples=[], error_code="timeout"),
        with_result(samples=[], error_code="cancelled"),
        with_result(samples=[], skip_reason="null_prompt"),
        with_result(prompt_tokens=2**31),
        with_result(prompt_tokens=False),
        with_result(cached_tokens=0.5),
        with_result(error_message=0),
        with_result(seed=2**63),
        with_result(prompt_sha256=None),
        with_result(truncated_tokens=-1),
        with_result(truncated_tokens=None),
        with_result(prompt_logprobs=[]),
        with_sample(more=1),
        with_sample(text=None),
        with_sample(text=3),
        with_sample(finish_reason="done"),
        with_sample(finish_reason="error"),
        with_sample(finish_reason="skipped"),
        with_sample(finish_reason=None),
        with_sample(stop_reason=["stop"]),
        with_sample(completion_tokens=-1),
        with_sample(completion_tokens=None),
        with_sample(ends_in_partial_character=0),
        with_sample(token_ids=None),
        with_sample(token_ids="12"),
        with_sample(token_ids=[1, -1]),
        with_sample(token_ids=[1, 2**31]),
        with_sample(cumulative_logprob=-1),
        with_sample(cumulative_logprob="-Infinity"),
        with_sample(score=True),
        with_sample(score="0.5"),
        with_logprobs(more=""),
        with_logprobs(token_ids="AAAA"),
        with_logprobs(token_ids="AAAAAA=="),
        with_logprobs(token_ids=None),
        with_logprobs(logprobs="ß"),
        with_logprobs(ranks="/////w=="),
        with_logprobs(top_counts="/////wMAAAA="),
        with_logprobs(top_ids=""),
        with_result(prompt=[]),
    ],
)
def test_a_whole_frame_that_is_no_record_ends_reading(store, record):
    write(store, result("zero"))
    good = read(store)
    put(store, good + frame(record) + frame(VALID))

    assert found(opened(store)) == {0: "zero"}
    assert read(store) == good


def test_a_record_that_lacks_a_field_ends_reading(store):
    write(store, result("zero"))
    good = read(store)

    for name in VALID["result"]:
        less = {key: value for key, value in VALID["result"].items() if key != name}
        put(store, good + frame(VALID | {"result": less}))
        assert found(opened(store)) == {0: "zero"}

    for name in VALID["result"]["samples"][0]:
        less = {k: v for k, v in VALID["result"]["samples"][0].items() if k != name}
        put(store, good + frame(with_result(samples=[less])))
        assert found(opened(store)) == {0: "zero"}


def test_a_valid_record_is_read(store):
    write(store, result("zero"))
    put(store, read(store) + frame(VALID))

    after = opened(store)

    row = after.find(UNIT, address(1), DIGEST)
    assert row is not None
    assert [one.text for one in row.samples] == ["valid", "too"]
    assert row.samples[0].logprobs == row.prompt_logprobs == SCORED
    assert found(after) == {0: "zero", 1: "valid"}


TEXTS = [
    "",
    "\ud800",
    "\ud83d\ude00",  # two halves, not one character
    "\ude00\ud83d",
    "😀",
    "a\0b",
    "\x1b\u2028\ufeff\r\n",
    '"\\"',
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_as_it_was(store, text):
    file = f"{text}.parquet"
    row = result(text, stop_reason=text, prompt=text, error_message=text)
    journal = opened(store)
    journal.add(UNIT, address(0, file=file), row)
    journal.flush()

    assert opened(store).find(UNIT, address(0, file=file), DIGEST) == row


def test_long_text_comes_back_and_what_is_too_long_is_left_out(store):
    long = "ß" * 1_000_000
    write(store, result(long), result("x" * journal_frame.MAX_PAYLOAD_BYTES), result("two"))

    assert found(opened(store)) == {0: long, 2: "two"}


TEXT = st.text(st.characters(exclude_categories=()), max_size=20)
COUNT = st.integers(0, 2**31 - 1)
NUMBER = st.none() | st.floats(allow_nan=False)
LOGPROBS = st.none() | st.lists(
    st.tuples(
        COUNT,
        st.none() | st.floats(width=32, allow_nan=False),
        st.none() | st.integers(1, 2**31 - 1),
        st.lists(st.tuples(COUNT, st.floats(width=32, allow_nan=False)), max_size=2).map(tuple),
    ),
    max_size=3,
)
SAMPLE = {
    "text": TEXT,
    "finish_reason": st.sampled_from(["stop", "length"]),
    "stop_reason": st.none() | TEXT,
    "completion_tokens": COUNT,
    "ends_in_partial_character": st.booleans(),
    "token_ids": st.lists(COUNT, max_size=5).map(tuple),
    "cumulative_logprob": NUMBER,
    "score": NUMBER,
    "logprobs": LOGPROBS,
}
GOOD = {
    "samples": st.lists(st.fixed_dictionaries(SAMPLE), min_size=1, max_size=3),
    "error_code": st.none(),
}
BAD = {
    "samples": st.just([]),
    "error_code": st.sampled_from(["prompt_too_long", "kv_capacity", "nonfinite_logits"]),
}
MORE = {
    "prompt_tokens": st.none() | COUNT,
    "cached_tokens": COUNT,
    "error_message": st.none() | TEXT,
    "seed": st.none() | st.integers(0, 2**63 - 1),
    "prompt_sha256": st.text("0123456789abcdef", min_size=64, max_size=64),
    "prompt": st.none() | TEXT,
    "prompt_logprobs": LOGPROBS,
    "truncated_tokens": COUNT,
}
# Values, not objects: the type checks of their constructors must not run inside a strategy.
ADDRESSES = st.tuples(TEXT, COUNT, st.integers(0, 2**63 - 1))
RESULTS = st.fixed_dictionaries(GOOD | MORE) | st.fixed_dictionaries(BAD | MORE)


def packed(tokens) -> TokenLogprobs | None:
    if tokens is None:
        return None
    names = ("token_id", "logprob", "rank", "top")
    entries = [TokenLogprob(**dict(zip(names, token, strict=True))) for token in tokens]
    return TokenLogprobs.pack(entries)


def row_of(values: dict) -> RowResult:
    samples = tuple(
        SampleResult(**(one | {"logprobs": packed(one["logprobs"])})) for one in values["samples"]
    )
    more = {"samples": samples, "prompt_logprobs": packed(values["prompt_logprobs"])}
    return RowResult(**(values | more))


@given(st.dictionaries(ADDRESSES, RESULTS, max_size=4))
def test_every_result_comes_back_as_it_was(values):
    rows = {
        RowAddress(file=file, row_group=row_group, index=index): row_of(fields)
        for (file, row_group, index), fields in values.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        store = local_store(pathlib.Path(folder))
        journal = opened(store)
        for where, row in rows.items():
            journal.add(UNIT, where, row)
        journal.flush()
        after = opened(store)

    assert after.num_rows == len(rows)
    for where, row in rows.items():
        assert row.prompt_sha256 is not None
        assert after.find(UNIT, where, row.prompt_sha256) == row


@pytest.mark.parametrize(
    "row",
    [
        failed("timeout"),
        failed("cancelled"),
        RowResult(error_code="null_prompt", error_message="why"),
        RowResult(skip_reason="null_prompt"),
    ],
)
def test_what_is_no_verdict_or_cost_nothing_is_not_logged(store, row):
    write(store, row)

    assert store.read_log(LOG) is None


class Clock:
    """Stands still until it is set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def timed(store, clock) -> Callable[[float], Journal]:
    return lambda interval: Journal(store, interval=interval, clock=clock)


def test_a_row_waits_for_the_interval_and_no_longer(store, timed, clock):
    journal = timed(5.0)
    journal.add(UNIT, address(0), result("zero"))
    clock.now += 4.0
    journal.add(UNIT, address(1), result("one"))
    clock.now += 0.9
    journal.flush_if_due()
    assert store.read_log(LOG) is None

    clock.now += 0.1
    journal.flush_if_due()
    assert found(opened(store)) == {0: "zero", 1: "one"}


def test_the_interval_begins_anew_with_the_first_row_behind_a_flush(store, timed, clock):
    journal = timed(5.0)
    journal.add(UNIT, address(0), result("zero"))
    clock.now += 5.0
    journal.flush_if_due()
    clock.now += 60.0
    journal.add(UNIT, address(1), result("one"))
    clock.now += 4.9
    journal.flush_if_due()
    assert found(opened(store)) == {0: "zero"}

    clock.now += 0.1
    journal.flush_if_due()
    assert found(opened(store)) == {0: "zero", 1: "one"}


def test_the_oldest_row_of_all_units_counts_and_a_dropped_one_does_not(store, timed, clock):
    other = Unit(index=4, start=40, stop=50)
    journal = timed(5.0)
    journal.add(UNIT, address(0), result("zero"))
    clock.now += 3.0
    journal.add(other, address(0), result("other"))
    journal.drop(UNIT)
    clock.now += 3.0
    journal.flush_if_due()
    assert store.logs("_jaxpaged/journal") == []

    journal.add(UNIT, address(0), result("zero"))
    clock.now += 2.0
    journal.flush_if_due()
    assert store.logs("_jaxpaged/journal") == ["000003", "000004"]


def test_without_an_interval_every_call_writes_what_there_is(store, timed):
    journal = timed(0.0)
    journal.flush_if_due()
    assert store.read_log(LOG) is None

    for index in range(3):
        journal.add(UNIT, address(index), result(str(index)))
        journal.flush_if_due()
        assert len(found(opened(store))) == index + 1


def test_a_long_interval_does_not_fill_the_memory(store, timed):
    journal = timed(1e9)
    for index in range(3):
        journal.add(UNIT, address(index), result("x" * 6_000_000))
        journal.flush_if_due()
        assert len(found(opened(store))) == (3 if index == 2 else 0)


def test_a_dropped_unit_leaves_nothing(store):
    other = Unit(index=4, start=40, stop=50)
    write(store, result("zero"))
    journal = opened(store, UNIT, other)
    journal.add(UNIT, address(1), result("written"))
    journal.add(other, address(1), result("other"))
    journal.flush()
    journal.add(UNIT, address(2), result("waiting"))

    journal.drop(UNIT)
    journal.flush()

    assert (found(journal), journal.num_rows) == ({}, 0)
    assert store.logs("_jaxpaged/journal") == ["000004"]
    assert opened(store, UNIT, other).num_rows == 1


def test_rows_count_until_their_unit_is_dropped(store):
    other = Unit(index=4, start=40, stop=50)
    before = opened(store, UNIT, other)
    for unit in (UNIT, other):
        before.add(unit, address(0), result())
        before.add(unit, address(1), result())
    before.flush()
    journal = opened(store, UNIT, other)
    journal.add(UNIT, address(2), result())

    assert journal.num_rows == 4
    journal.drop(other)
    assert journal.num_rows == 2


def test_a_unit_that_never_had_a_log_is_dropped_without_touching_the_store(tmp_path):
    class Untouchable(Disk):
        def unlink(self, path: pathlib.Path) -> None:
            raise OSError(errno.EROFS, "read-only")

    journal = opened(local_store(tmp_path / "out", Untouchable()))
    journal.add(UNIT, address(0), result())

    journal.drop(UNIT)
    journal.flush()
    assert not (tmp_path / "out" / "_jaxpaged/journal").exists(), "what waited is forgotten with it"


class Full(Disk):
    """Has room for some bytes of a log; then a write fails with a part of it written."""

    def __init__(self) -> None:
        self.room = 0

    def append(self, path: pathlib.Path, data: bytes) -> None:
        super().append(path, data[: self.room])
        if len(data) > self.room:
            raise OSError(errno.ENOSPC, "no space left on device", str(path))


def test_a_failed_flush_can_be_tried_again_wherever_it_failed(tmp_path):
    disk = Full()
    write(local_store(tmp_path / "other"), result("zero"), result("one"))
    num_bytes = len(read(local_store(tmp_path / "other")))

    for room in range(num_bytes):
        store = local_store(tmp_path / f"out{room}", disk)
        journal = opened(store)
        journal.add(UNIT, address(0), result("zero"))
        journal.add(UNIT, address(1), result("one"))
        disk.room = room
        with pytest.raises(StorageError, match="no space"):
            journal.flush()
        disk.room = 10**6
        journal.add(UNIT, address(2), result("two"))
        journal.flush()

        assert found(opened(store)) == {0: "zero", 1: "one", 2: "two"}


def test_a_flush_that_fails_behind_earlier_ones_costs_none_of_them(tmp_path):
    disk = Full()
    store = local_store(tmp_path / "out", disk)
    disk.room = 10**6
    write(store, result("zero"))
    journal = opened(store)
    journal.add(UNIT, address(1), result("one"))
    disk.room = 20
    with pytest.raises(StorageError, match="no space"):
        journal.flush_if_due()
    assert found(opened(local_store(tmp_path / "out"))) == {0: "zero"}

    disk.room = 10**6
    journal.flush()

    assert found(opened(store)) == {0: "zero", 1: "one"}


def test_a_log_that_a_failed_flush_left_goes_with_its_unit(tmp_path):
    disk = Full()
    store = local_store(tmp_path / "out", disk)
    journal = opened(store)
    journal.add(UNIT, address(0), result("zero"))
    disk.room = 3
    with pytest.raises(StorageError, match="no space"):
        journal.flush()

    journal.drop(UNIT)

    assert store.logs("_jaxpaged/journal") == []


def test_other_parameters_are_another_row(store):
    journal = opened(store)
    journal.add(UNIT, address(0), result("short"), params="8 0.0 None")
    journal.flush()

    after = opened(store)
    assert after.find(UNIT, address(0), DIGEST, params="8 0.0 None") == result("short")
    assert after.find(UNIT, address(0), DIGEST, params="9 0.0 None") is None
