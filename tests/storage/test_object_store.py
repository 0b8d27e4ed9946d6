import traceback

import pytest
from botocore.exceptions import EndpointConnectionError, NoCredentialsError, ReadTimeoutError
from faulty_filesystem import FaultyFilesystem, answer
from fsspec.exceptions import FSTimeoutError
from store_suite import RacingStoreSuite, store

from jaxpaged.errors import ConfigError, StorageError
from jaxpaged.storage import remote_faults, s3_uploads
from jaxpaged.storage.object_store import ObjectStore
from jaxpaged.storage.remote_calls import FIRST_PAUSES, PAUSES

__all__ = ["store"]

URL = "s3://bucket/out"

PASSING = [
    answer(500, "InternalError"),
    answer(503, "SlowDown"),
    answer(409, "ConditionalRequestConflict"),
    answer(400, "RequestTimeout"),
    TimeoutError("slow"),
    FSTimeoutError(),
    ConnectionResetError("reset"),
    EndpointConnectionError(endpoint_url="http://127.0.0.1:1/bucket"),
    ReadTimeoutError(endpoint_url="http://127.0.0.1:1/bucket"),
]


class TestObjectStore(RacingStoreSuite):
    @pytest.fixture
    def connect(self):
        filesystem = FaultyFilesystem()
        return lambda: make_store(filesystem)


def make_store(filesystem: FaultyFilesystem, sleep=None) -> ObjectStore:
    def never(seconds: float) -> None:
        raise AssertionError(f"waited {seconds} seconds")

    return ObjectStore(filesystem, "bucket/out", url=URL, private="_jaxpaged", sleep=sleep or never)


@pytest.fixture
def filesystem():
    return FaultyFilesystem()


@pytest.fixture
def pauses() -> list[float]:
    """The seconds a store would have waited."""
    return []


@pytest.fixture
def faulty(filesystem, pauses) -> ObjectStore:
    """A store that was locked before anything failed, and waits in no time."""
    found = make_store(filesystem, pauses.append)
    assert found.lock()
    filesystem.calls.clear()
    return found


def publish(store: ObjectStore, data: bytes, name: str) -> None:
    scratch = store.scratch(name)
    scratch.write_bytes(data)
    store.publish(scratch, name, is_new=False)


WRITES = {
    "create": ("pipe_file", lambda store: store.create("name", b"new")),
    "replace": ("pipe_file", lambda store: store.replace("name", b"new")),
    "publish": ("put_file", lambda store: publish(store, b"new", "name")),
    "copy": ("cp_file", lambda store: store.copy("other", "name")),
}


@pytest.mark.parametrize("error", PASSING, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("after", ["no effect", "effect"])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_whose_answer_is_lost_is_made_again_with_one_outcome(
    faulty, filesystem, pauses, write, after, error
):
    call, do = WRITES[write]
    faulty.replace("other", b"new")
    filesystem.fail(call, error, 3, after=after)

    assert do(faulty) is not False

    assert faulty.read("name") == b"new"
    assert faulty.entries() == {"name": 3, "other": 3}
    assert pauses == list(PAUSES[:3])
    faulty.unlock()


@pytest.mark.parametrize("after", ["no effect", "effect"])
def test_a_lost_answer_adds_nothing_to_a_log_twice(faulty, filesystem, after):
    faulty.append("journal/0", b"one;")
    filesystem.fail("pipe_file", TimeoutError("slow"), 2, after=after)
    faulty.append("journal/0", b"two;")
    faulty.append("journal/0", b"three;")

    assert faulty.read_log("journal/0") == b"one;two;three;"


@pytest.mark.parametrize(
    "refusal",
    [
        FileExistsError("name"),
        answer(412, "PreconditionFailed"),
        answer(412, "412"),
    ],
    ids=["typed", "without a condition", "without a body"],
)
def test_a_refused_create_is_told_by_the_bytes_that_are_there(faulty, filesystem, refusal):
    faulty.replace("mine", b"bytes")
    faulty.replace("theirs", b"other bytes")
    for name, is_mine in (("mine", True), ("theirs", False)):
        filesystem.fail("pipe_file", refusal, after="no effect")
        assert faulty.create(name, b"bytes") is is_mine
    assert faulty.read("theirs") == b"other bytes"


def test_another_writers_record_is_not_taken_for_a_lost_answer(faulty, filesystem):
    filesystem.fail("pipe_file", answer(500, "InternalError"), after="no effect")
    original = filesystem.pipe_file

    def other_writer(seconds: float) -> None:
        original("bucket/out/name", b"theirs", mode="create")

    late = make_store(filesystem, other_writer)

    assert not late.create("name", b"mine")
    assert late.read("name") == b"theirs"


def test_an_error_that_stays_is_given_up_with_a_clear_message(faulty, filesystem, pauses):
    filesystem.fail_always("pipe_file", answer(500, "InternalError", "We had an error."))

    with pytest.raises(StorageError) as caught:
        faulty.replace("commits/000000.json", b"new")

    assert str(caught.value) == (
        "cannot write s3://bucket/out/commits/000000.json: We had an error. (500 InternalError), "
        f"{len(PAUSES) + 1} times; once the store answers again, running the job again continues"
    )
    assert pauses == list(PAUSES)
    filesystem.mend()
    faulty.replace("commits/000000.json", b"new")
    assert faulty.read("commits/000000.json") == b"new"


def test_a_place_that_never_answered_is_given_up_soon(filesystem, pauses):
    filesystem.fail_always("pipe_file", EndpointConnectionError(endpoint_url="http://127.0.0.1:1"))
    new = make_store(filesystem, pauses.append)

    with pytest.raises(ConfigError, match=r"output.path: cannot write s3://.*127\.0\.0\.1"):
        new.lock()
    assert pauses == list(FIRST_PAUSES)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (answer(403, "AccessDenied", "Access Denied"), r"Access Denied \(403 AccessDenied\); .*ri"),
        (answer(403, "403", "Forbidden"), r"Forbidden \(403\); the credentials need the rights"),
        (answer(400, "ExpiredToken", "It has expired"), r"It has expired.*; the credentials need"),
        (PermissionError("no"), r"no; the credentials need the rights to list the bucket and"),
        (OSError("Forbidden: https://host/b\nwhy"), r"Forbidden: https://host/b; the credent"),
        (NoCredentialsError(), r"Unable to locate credentials; the credentials need"),
        (answer(404, "NoSuchBucket", "No such"), r"No such.*; there is no such bucket; make it"),
        (FileNotFoundError("x"), r"there is no such bucket; make it, or correct the URL"),
        (answer(400, "InvalidRequest", "Odd"), r"Odd \(400 InvalidRequest\)$"),
        (answer(301, "PermanentRedirect", "Elsewhere"), r"Elsewhere \(301 PermanentRedirect\)$"),
        (ValueError("Bad Request: x"), r"Bad Request: x$"),
    ],
)
def test_an_error_that_would_stay_is_told_at_once(faulty, filesystem, pauses, error, message):
    for call, do in WRITES.values():
        if call != "cp_file":
            filesystem.fail(call, error, after="no effect")
            with pytest.raises(
                StorageError, match=r"cannot write s3://bucket/out/name: " + message
            ):
                do(faulty)
    assert pauses == []
    assert faulty.entries() == {}
    filesystem.fail("pipe_file", error, after="no effect")
    with pytest.raises(ConfigError, match=r"output.path: cannot write s3://bucket/out/_jaxpaged/"):
        faulty.lock()
    faulty.unlock()


@pytest.mark.parametrize("error", [TypeError("a bug"), KeyError("a bug"), AssertionError("a bug")])
def test_a_bug_is_no_storage_error(faulty, filesystem, error):
    filesystem.fail("cat_file", error, after="no effect")

    with pytest.raises(type(error), match="a bug"):
        faulty.read("name")


@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("read", "file"),
        ("open", "file"),
        ("modified", "file"),
        ("delete", "file"),
        ("entries", "journal/0"),
        ("read_log", "journal/0"),
        ("delete_log", "journal/0"),
        ("logs", "journal"),
    ],
)
def test_reading_is_repeated_and_given_up_like_writing(faulty, filesystem, pauses, method, name):
    faulty.replace("file", b"bytes")
    faulty.append("journal/0", b"record")
    calls = ("cat_file", "ls", "rm_file", "modified")
    for call in calls:
        filesystem.fail(call, FSTimeoutError(), after="no effect")
    found = getattr(faulty, method)(name)
    assert found or method.startswith("delete")
    assert pauses == [PAUSES[0]] * len(pauses)
    assert pauses

    for call in calls:
        filesystem.fail_always(call, answer(503, "SlowDown", "Please slow down"))
    with pytest.raises(StorageError, match=rf"{URL}/{name}: Please slow down .*10 times"):
        getattr(faulty, method)(name)


def test_a_missing_bucket_is_told_to_readers_too(faulty, filesystem):
    for call in ("cat_file", "ls"):
        filesystem.fail_always(call, answer(404, "NoSuchBucket", "The bucket does not exist"))
    for read in (faulty.read, faulty.entries):
        with pytest.raises(StorageError, match=r"there is no such bucket; make it, or correct"):
            read("name")


def test_a_read_of_an_open_file_is_repeated(faulty, filesystem, pauses):
    data = bytes(range(256)) * 10_000
    faulty.replace("part", data)
    with faulty.open("part") as file:
        assert file.read(100) == data[:100]
        file.seek(2_000_000)
        filesystem.fail("read", ConnectionResetError("reset"), 2, after="effect")
        assert file.read(300) == data[2_000_000:2_000_300]
        assert pauses == list(PAUSES[:2])
        file.seek(0)
        filesystem.fail("read", FileNotFoundError("gone"), after="no effect")
        with pytest.raises(StorageError, match=r"cannot read s3://bucket/out/part: it does not ex"):
            file.read()


@pytest.mark.parametrize("conditions", ["ignored", "unsupported"])
def test_a_store_without_conditional_writes_is_found_out_and_told(conditions):
    store = make_store(FaultyFilesystem(conditions))

    assert store.lock()

    assert not store.has_conditional_create
    assert len(store.notes) == 1
    assert "overwrites objects even when asked not to" in store.notes[0]
    assert "told apart by their lease alone" in store.notes[0]
    assert store.create("name", b"one")
    assert store.create("name", b"one")
    assert not store.create("name", b"two")
    assert store.read("name") == b"one"
    store.lock()
    assert len(store.notes) == 1


def test_a_store_with_conditional_writes_has_nothing_to_say(faulty):
    assert faulty.has_conditional_create
    assert faulty.notes == ()
    assert not faulty.excludes_writers
    assert faulty.is_locked() is None


def test_the_probe_survives_lost_answers_and_leaves_nothing(filesystem, pauses):
    for _ in range(2):
        filesystem.fail("pipe_file", TimeoutError("slow"), after="effect")
    filesystem.fail("rm_file", TimeoutError("slow"), after="effect")
    store = make_store(filesystem, pauses.append)

    assert store.lock()

    assert store.has_conditional_create
    assert len(pauses) == 3
    assert filesystem.store == {}


def test_a_log_whose_removal_was_cut_short_has_no_late_records(faulty, filesystem):
    for number in range(5):
        faulty.append("journal/0", b"%d;" % number)
    faulty.delete("journal/0/00000002")
    later = make_store(filesystem)

    assert later.read_log("journal/0") == b"0;1;"
    later.append("journal/0", b"new;")
    later.append("journal/0", b"newer;")
    assert later.read_log("journal/0") == b"0;1;new;newer;"
    assert later.entries("journal/0").keys() == {f"0000000{number}" for number in range(4)}


def test_a_cut_that_fails_midway_leaves_the_first_bytes(faulty, filesystem):
    whole = b"".join(b"%d;" % number for number in range(9))
    for call in ("rm_file", "pipe_file"):
        faulty.delete_log("journal/0")
        for number in range(9):
            faulty.append("journal/0", b"%d;" % number)
        filesystem.fail_always(call, answer(500, "InternalError"))

        with pytest.raises(StorageError):
            faulty.truncate("journal/0", 7)

        filesystem.mend()
        left = faulty.read_log("journal/0")
        assert left is not None
        assert len(left) >= 7
        assert whole.startswith(left)
        make_store(filesystem).truncate("journal/0", 7)
        assert faulty.read_log("journal/0") == whole[:7]


def test_two_writers_of_a_log_overwrite_nothing(faulty, filesystem):
    other = make_store(filesystem)
    faulty.append("journal/0", b"a1;")
    other.append("journal/0", b"b1;")
    faulty.append("journal/0", b"a2;")
    faulty.append("journal/0", b"a3;")
    other.append("journal/0", b"b2;")

    assert faulty.read_log("journal/0") == b"a1;b1;a2;a3;b2;"


def test_the_scratch_folder_goes_with_the_lock(faulty):
    first, second = faulty.scratch("a/part"), faulty.scratch("b/part")
    assert first != second
    first.write_bytes(b"unfinished")

    faulty.unlock()

    assert not first.parent.exists()


def test_a_vanished_scratch_file_is_a_message(faulty):
    scratch = faulty.scratch("part")
    with pytest.raises(StorageError, match=r"cannot write to .*part: No such file or directory"):
        faulty.publish(scratch, "part", is_new=False)
    faulty.unlock()


def test_an_object_is_no_folder(faulty):
    faulty.replace("part", b"rows")
    assert faulty.entries("part") == {}
    assert faulty.logs("part") == []


def test_only_s3_is_swept(faulty, filesystem):
    faulty.sweep()
    assert filesystem.calls == []


def test_uploads_are_swept_page_by_page_and_never_those_of_others():
    server = CarelessServer(["out/a", "out2/b", "out/c", "other", "out"])

    s3_uploads.abort_under(server, "bucket/out")

    assert server.aborted == ["out/a", "out/c"]


class CarelessServer(FaultyFilesystem):
    """Lists all uploads of a bucket, one on each page, whatever it is asked for.

    Attributes:
        aborted: The keys of the uploads that were aborted.
    """

    def __init__(self, keys: list[str]) -> None:
        super().__init__()
        self.aborted: list[str] = []
        self._keys = keys

    def call_s3(self, method: str, *, Bucket: str, **arguments: str) -> dict[str, object]:
        assert Bucket == "bucket"
        if method == "abort_multipart_upload":
            assert arguments["UploadId"] == f"upload of {arguments['Key']}"
            self.aborted.append(arguments["Key"])
            return {}
        key = self._keys[int(arguments.get("KeyMarker", "0"))]
        number = self._keys.index(key) + 1
        return {
            "Uploads": [{"Key": key, "UploadId": f"upload of {key}"}],
            "IsTruncated": number < len(self._keys),
            "NextKeyMarker": str(number),
            "NextUploadIdMarker": "",
        }


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("GET https://h/b/k?X-Amz-Signature=5e&X-Amz-Credential=a", "GET https://h/b/k"),
        ("at 'http://user:pass@h:9000/b'", "at 'http://h:9000/b'"),
        ("The key AKIAIOSFODNN7EXAMPLE is unknown", "The key *** is unknown"),
        ("Authorization: Bearer ya29.abc-def", "Authorization: Bearer ***"),
        ("{'aws_secret_access_key': 'wJalr/K7'}", "{'aws_secret_access_key': ***"),
        ("session_token=abc; more", "session_token=***; more"),
        ("plain text: with a colon", "plain text: with a colon"),
        ("first line\nsecond line", "first line"),
    ],
)
def test_no_credentials_of_a_librarys_text_are_passed_on(text, clean):
    assert remote_faults.reason(OSError(5, text)) == clean


def test_a_traceback_shows_no_text_of_the_library(faulty, filesystem):
    filesystem.fail("pipe_file", answer(403, "AccessDenied", "token=hush"), after="no effect")
    with pytest.raises(StorageError) as caught:
        faulty.replace("name", b"new")

    shown = "".join(traceback.format_exception(caught.value))
    assert "hush" not in shown
    assert "token=***" in shown


def test_long_texts_are_cut_and_empty_ones_named():
    assert len(remote_faults.reason(OSError(5, "x" * 1000))) < 400
    assert remote_faults.reason(TimeoutError()) == "TimeoutError"


@pytest.mark.parametrize("num_bytes", [0, 1, 2, 5 * 1024**2, 5 * 1024**3 - 1])
def test_what_s3_takes_in_one_put_is_not_split(num_bytes):
    # s3fs splits from two chunks on.
    assert num_bytes < 2 * s3_uploads.whole(num_bytes)["chunksize"]
    assert s3_uploads.whole(5 * 1024**3) == {}
