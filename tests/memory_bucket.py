"""A bucket in memory that s3:// leads to: no server, and every change of it is one step.

It is found through fsspec's registry, so that whole jobs run on it as they are.
"""

import contextlib
import datetime
import io
import threading
from collections.abc import Callable, Iterator
from typing import Literal

import fsspec
import pyarrow.parquet as pq
import s3fs
from faulty_filesystem import FaultyFilesystem
from fsspec.implementations.memory import MemoryFile

Conditions = Literal["obeyed", "ignored", "unsupported"]
Objects = dict[str, MemoryFile]


class MemoryBucket:
    """What all see who connect.

    Args:
        conditions: What becomes of conditional writes.

    Attributes:
        objects: By path.
        before_change: Who connects from now on calls this with the name of what it is about to
            change.
    """

    def __init__(self, conditions: Conditions = "obeyed") -> None:
        self.conditions: Conditions = conditions
        self.objects: Objects = {}
        self.before_change: Callable[[str], object] | None = None
        self.lock = threading.RLock()

    @contextlib.contextmanager
    def connected(self) -> Iterator[None]:
        """Has s3:// lead here."""
        fsspec.register_implementation("s3", _filesystem(self), clobber=True)
        try:
            yield
        finally:
            fsspec.register_implementation("s3", s3fs.S3FileSystem, clobber=True)

    def copied(self) -> Objects:
        """The objects as they are."""
        copies = {}
        for path, file in self.objects.items():
            copies[path] = MemoryFile(None, path, file.getvalue())
            copies[path].modified = file.modified
        return copies

    def age(self, seconds: float) -> None:
        """Has everything been written so much earlier."""
        with self.lock:
            for file in self.objects.values():
                file.modified -= datetime.timedelta(seconds=seconds)

    def rows(self, folder: str) -> list[dict]:
        """What readers of a folder see."""
        with self.lock:
            parts = [
                file.getvalue()
                for path, file in sorted(self.objects.items())
                if path.rpartition("/")[0] == f"/{folder}" and path.endswith(".parquet")
            ]
        return [row for part in parts for row in pq.read_table(io.BytesIO(part)).to_pylist()]


def _filesystem(bucket: MemoryBucket) -> type[FaultyFilesystem]:
    class BucketFilesystem(FaultyFilesystem):
        def __init__(self, **_: object) -> None:
            super().__init__(bucket.conditions)
            self.store = bucket.objects
            self._lock = bucket.lock
            self._before_change = bucket.before_change

        def _changes(self, path: str) -> None:
            # Signs of life come when they want to.
            is_step = threading.current_thread() is threading.main_thread() or ".beat" not in path
            if self._before_change is not None and is_step:
                self._before_change(path)

        def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: object) -> None:
            self._changes(path)
            super().pipe_file(path, value, mode)

        def put_file(
            self, lpath: str, rpath: str, callback: object = None, mode: str = "", **_: object
        ) -> None:
            self._changes(rpath)
            super().put_file(lpath, rpath, callback, mode)

        def rm_file(self, path: str) -> None:
            self._changes(path)
            super().rm_file(path)

        def cp_file(self, path1: str, path2: str, **_: object) -> None:
            self._changes(path2)
            super().cp_file(path1, path2)

    return BucketFilesystem
