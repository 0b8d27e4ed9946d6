"""A server process that speaks S3, on the loopback interface, and how a job reaches it.

A conftest makes the fixtures known to its folder by importing them.
"""

import re
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator

import fsspec
import pytest

from jaxpaged.storage import access
from jaxpaged.storage.options import StorageOptions

KEY = "key-of-the-tests"
SECRET = "secret-of-the-tests"

_ADDRESS = re.compile(r"Running on (http://127\.0\.0\.1:\d+)")


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The endpoint of a server that is stopped with the session; it answers anyone."""
    command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if found := _ADDRESS.search(line):
                break
        else:
            pytest.fail(f"the S3 server did not start:\n{''.join(said)}")
        # It logs every request; a full pipe would stop it.
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield found[1]
        process.terminate()


@pytest.fixture(scope="session")
def s3_options(s3_server: str) -> Iterator[StorageOptions]:
    """How the server is reached, with keys from environment variables, which subprocesses have."""
    with pytest.MonkeyPatch.context() as environment:
        for name in ("AWS_PROFILE", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
            environment.delenv(name, raising=False)
        environment.setenv("JAXPAGED_TEST_KEY", KEY)
        environment.setenv("JAXPAGED_TEST_SECRET", SECRET)
        yield StorageOptions.model_validate({"s3": section(s3_server)})


@pytest.fixture(scope="session")
def s3_filesystem(s3_options: StorageOptions) -> fsspec.AbstractFileSystem:
    """One connection for many tests, because it takes a second to make one."""
    filesystem, _ = access.filesystem("s3://any", s3_options)
    return filesystem


@pytest.fixture
def s3_bucket(s3_filesystem) -> str:
    """The URL of an empty bucket that is this test's own."""
    bucket = f"test-{uuid.uuid4().hex}"
    s3_filesystem.call_s3("create_bucket", Bucket=bucket)
    return f"s3://{bucket}"


def section(endpoint: str) -> dict[str, str]:
    """The keys of `storage.s3` in a job file."""
    return {
        "endpoint_url": endpoint,
        "region": "us-east-1",
        "key": "${ENV:JAXPAGED_TEST_KEY}",
        "secret": "${ENV:JAXPAGED_TEST_SECRET}",
    }
