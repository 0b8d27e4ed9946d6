import socket
import subprocess
import sys
import traceback
from collections.abc import Callable

import pytest
from s3_server import KEY, SECRET, section
from store_suite import RacingStoreSuite, store

from jaxpaged.errors import ConfigError, StorageError
from jaxpaged.storage import access
from jaxpaged.storage.object_store import ObjectStore
from jaxpaged.storage.options import StorageOptions
from jaxpaged.storage.remote_calls import FIRST_PAUSES

__all__ = ["store"]

Upload = Callable[[str], str]


class TestS3(RacingStoreSuite):
    clock_step = 1.1

    @pytest.fixture
    def connect(self, s3_bucket, s3_filesystem):
        return lambda: make_store(s3_filesystem, f"{s3_bucket}/my out")


def make_store(filesystem, url: str, sleep=None) -> ObjectStore:
    def never(seconds: float) -> None:
        raise AssertionError(f"waited {seconds} seconds")

    path = url.removeprefix("s3://")
    return ObjectStore(filesystem, path, url=url, private="_jaxpaged", sleep=sleep or never)


@pytest.fixture
def bucket(s3_bucket) -> str:
    return s3_bucket.removeprefix("s3://")


@pytest.fixture
def start_upload(s3_filesystem, bucket) -> Upload:
    """Leaves a multipart upload unfinished under a key of the bucket."""

    def start(key: str) -> str:
        upload = s3_filesystem.call_s3("create_multipart_upload", Bucket=bucket, Key=key)
        s3_filesystem.call_s3(
            "upload_part",
            Bucket=bucket,
            Key=key,
            PartNumber=1,
            UploadId=upload["UploadId"],
            Body=b"part",
        )
        return key

    return start


def uploads(filesystem, bucket: str) -> set[str]:
    page = filesystem.call_s3("list_multipart_uploads", Bucket=bucket)
    return {upload["Key"] for upload in page.get("Uploads", [])}


def test_a_store_by_its_url(s3_bucket, s3_options):
    store = access.open_store(f"{s3_bucket}/out/", s3_options, private="_jaxpaged")

    assert isinstance(store, ObjectStore)
    assert store.url == f"{s3_bucket}/out"
    assert store.lock()
    assert store.has_conditional_create
    assert store.notes == ()
    assert store.entries() == {}
    assert store.create("part", b"rows")
    assert store.entries() == {"part": 4}
    store.unlock()


def test_a_whole_bucket_can_be_the_place(s3_filesystem, s3_bucket, start_upload, bucket):
    start_upload("other/part")
    store = make_store(s3_filesystem, s3_bucket)
    assert store.lock()
    store.replace("part-000000.parquet", b"rows")
    store.append("journal/0", b"record")

    store.sweep()

    assert store.entries() == {"journal": None, "part-000000.parquet": 4}
    assert store.logs("journal") == ["0"]
    assert uploads(s3_filesystem, bucket) == {"other/part"}


def test_only_unfinished_uploads_of_the_own_prefix_are_swept(
    s3_filesystem, s3_bucket, start_upload, bucket
):
    store = make_store(s3_filesystem, f"{s3_bucket}/jobs/out")
    store.replace("part-000000.parquet", b"rows")
    others = {start_upload(key) for key in ("jobs/out2/x", "jobs/out", "other", "jobs/ou")}
    for number in range(3):
        start_upload(f"jobs/out/part-{number}")
    start_upload("jobs/out/_jaxpaged/x")

    store.sweep()

    assert uploads(s3_filesystem, bucket) == others
    assert store.read("part-000000.parquet") == b"rows"
    assert store.notes == ()


def test_a_long_file_is_put_in_one_piece(s3_filesystem, s3_bucket, bucket):
    store = make_store(s3_filesystem, f"{s3_bucket}/out")
    scratch = store.scratch("part")
    # s3fs would split it by itself.
    scratch.write_bytes(bytes(101 * 1024**2))

    store.publish(scratch, "part", is_new=False)

    head = s3_filesystem.call_s3("head_object", Bucket=bucket, Key="out/part")
    assert head["ContentLength"] == 101 * 1024**2
    assert "-" not in head["ETag"]
    store.unlock()


def test_what_changes_under_a_reader_is_not_mixed(s3_filesystem, s3_bucket):
    store = make_store(s3_filesystem, f"{s3_bucket}/out")
    store.replace("part", b"1" * 4_000_000)
    with store.open("part") as file:
        assert file.read(10) == b"1" * 10
        store.replace("part", b"2" * 4_000_000)
        with pytest.raises(StorageError, match=r"cannot read s3://.*/out/part: .*no longer exists"):
            file.read()


def test_a_missing_bucket_is_named(s3_filesystem):
    store = make_store(s3_filesystem, "s3://no-such-bucket/out")

    message = r"s3://no-such-bucket/out.*; there is no such bucket; make it, or correct the URL"
    with pytest.raises(ConfigError, match="output.path: cannot write " + message):
        store.lock()
    for call in (store.entries, lambda: store.read("x"), lambda: store.replace("x", b"")):
        with pytest.raises(StorageError, match=message):
            call()


def test_a_dead_server_is_named_and_no_credential_is(s3_options):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        options = StorageOptions.model_validate({"s3": section(endpoint)})
        filesystem, _ = access.filesystem("s3://bucket/out", options)
        pauses: list[float] = []
        store = make_store(filesystem, "s3://bucket/out", pauses.append)

        with pytest.raises(ConfigError, match=rf"cannot write s3://bucket/out/.*{endpoint}") as why:
            store.lock()

    assert pauses == list(FIRST_PAUSES)
    shown = "".join(traceback.format_exception(why.value))
    for secret in (KEY, SECRET, "Signature", "?"):
        assert secret not in shown


def test_unsigned_requests_can_be_asked_for(s3_server, s3_bucket, s3_filesystem):
    make_store(s3_filesystem, f"{s3_bucket}/out").replace("x", b"1")
    options = StorageOptions.model_validate(
        {"s3": {"endpoint_url": s3_server, "region": "us-east-1", "anonymous": True}}
    )
    store = access.open_store(f"{s3_bucket}/out", options, private="_jaxpaged")

    assert store.entries() == {"x": 1}


def test_a_process_ends_without_a_word(s3_bucket, s3_options):
    # Connections that are not closed at the end would be warned of.
    script = (
        "import sys\n"
        "from jaxpaged.storage import access\n"
        "from jaxpaged.storage.options import StorageOptions\n"
        "options = StorageOptions.model_validate_json(sys.argv[2])\n"
        "store = access.open_store(sys.argv[1] + '/out', options, private='_jaxpaged')\n"
        "assert store.lock() and store.create('x', b'1')\n"
        "sys.stdout.write(str(store.entries()))\n"
    )
    options = s3_options.model_dump_json()
    command = [sys.executable, "-W", "default", "-c", script, s3_bucket, options]

    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert (done.stdout, done.stderr, done.returncode) == ("{'x': 1}", "", 0)
