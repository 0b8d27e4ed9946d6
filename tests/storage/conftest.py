"""The S3 server of the tests, and stores on it."""

import pytest

pytest.register_assert_rewrite("store_suite")

from s3_server import (  # noqa: E402  (the other line must come before any import of the suite)
    s3_bucket,
    s3_filesystem,
    s3_options,
    s3_server,
)

__all__ = ["s3_bucket", "s3_filesystem", "s3_options", "s3_server"]
