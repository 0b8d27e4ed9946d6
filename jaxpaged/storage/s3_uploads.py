"""What only S3 needs of an upload: to be one PUT, and an end if it was left unfinished."""

import contextlib
from typing import Any

import fsspec

# The most that S3 takes in one PUT.
_WHOLE_BYTES = 5 * 1024**3


def whole(num_bytes: int) -> dict[str, Any]:
    """The arguments with which s3fs puts a file of this size in one request, if S3 can take it."""
    # It splits what is at least twice as long as a chunk.
    return {"chunksize": num_bytes // 2 + 1} if num_bytes < _WHOLE_BYTES else {}


def abort_under(filesystem: fsspec.AbstractFileSystem, path: str) -> None:
    """Aborts the unfinished multipart uploads of objects under a path, and of no others.

    Safe to repeat.
    """
    remote: Any = filesystem
    bucket, _, prefix = path.partition("/")
    place: dict[str, str] = {}
    while True:
        page = remote.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/", **place)
        for upload in page.get("Uploads", []):
            # Some servers list more than was asked for.
            if upload["Key"].startswith(f"{prefix}/"):
                with contextlib.suppress(FileNotFoundError):
                    remote.call_s3(
                        "abort_multipart_upload",
                        Bucket=bucket,
                        Key=upload["Key"],
                        UploadId=upload["UploadId"],
                    )
        if not page.get("IsTruncated"):
            return
        place = {
            "KeyMarker": page.get("NextKeyMarker", ""),
            "UploadIdMarker": page.get("NextUploadIdMarker", ""),
        }
