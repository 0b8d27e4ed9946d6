"""A prefix of an object store as a store: whole PUTs, and conditional PUTs for `create`.

    replace         one PUT; the object is the old one or the new one at every moment
    create          one PUT that is refused if the object exists
    publish         either of them
    append          one PUT of an object of its own

Every request is repeated when it fails or its answer is lost. That is safe: a PUT, a copy and a
DELETE have the same effect twice, and a conditional PUT that is refused because an earlier try went
through is told by the bytes that are there.

Knows fsspec's calls, not which library is behind them, but for what only S3 has.
"""

import contextlib
import io
import pathlib
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable
from typing import Any, BinaryIO, TypeVar

import fsspec

from jaxpaged.errors import ConfigError, StorageError
from jaxpaged.storage import s3_uploads
from jaxpaged.storage.local_store import write_error
from jaxpaged.storage.remote_calls import Exists, Missing, RemoteCalls, Unsupported
from jaxpaged.storage.remote_files import RemoteFile
from jaxpaged.storage.segmented_logs import SegmentedLogs
from jaxpaged.storage.store import Entries

_READ_BYTES = 1024 * 1024

_Result = TypeVar("_Result")


class ObjectStore:
    """The objects under a prefix; see `Store` for the methods.

    Args:
        filesystem: The file system of the object store, without a cache of listings.
        path: The prefix in it.
        url: The prefix, for people.
        private: The name of the folder in it that is not meant for readers.
        sleep: How to wait before a request is repeated.

    Attributes:
        has_conditional_create: Whether the store refuses to create an object that exists, as far
            as is known: `lock` tries it.
        notes: What a user should know about this store.
    """

    excludes_writers = False

    def __init__(
        self,
        filesystem: fsspec.AbstractFileSystem,
        path: str,
        *,
        url: str,
        private: str,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.has_conditional_create = True
        self.notes: tuple[str, ...] = ()
        self._files: Any = filesystem
        self._path = path.rstrip("/")
        self._url = url
        self._private = private
        self._calls = RemoteCalls(sleep)
        self._is_s3 = "s3" in filesystem.protocol
        self._scratch: pathlib.Path | None = None
        self._logs = SegmentedLogs(self)

    @property
    def url(self) -> str:
        """The prefix's URL."""
        return self._url

    def lock(self) -> bool:
        """Checks that objects can be written, read and deleted; keeps no other writer out."""
        try:
            self._probe()
        except StorageError as error:
            raise ConfigError(f"output.path: {error}") from None
        return True

    def is_locked(self) -> bool | None:
        """An object store has no locks."""
        return None

    def unlock(self) -> None:
        """Removes the scratch files."""
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None

    def sweep(self) -> None:
        """Aborts multipart uploads that were left unfinished under the prefix; S3 alone has such.

        They are invisible, but are paid for. Where listing them is not allowed they stay.
        """
        if not self._is_s3:
            return
        try:
            self._run("clean up", "", lambda: s3_uploads.abort_under(self._files, self._path))
        except StorageError as error:
            self._note(f"unfinished uploads are left to the bucket's own rules: {error}")

    def scratch(self, name: str) -> pathlib.Path:
        """A path in a temporary folder of this machine."""
        if self._scratch is None:
            try:
                self._scratch = pathlib.Path(tempfile.mkdtemp(prefix="jaxpaged-"))
            except OSError as error:
                raise write_error(error, tempfile.gettempdir()) from None
        return self._scratch / name.replace("/", "-")

    def entries(self, folder: str = "") -> Entries:
        """Lists the objects with the folder's name before theirs."""
        place = self._at(folder)
        try:
            listing = self._run("list", folder, lambda: self._files.ls(place, detail=True))
        except Missing:
            return {}
        found: Entries = {}
        for entry in sorted(listing, key=lambda entry: entry["name"]):
            parent, _, name = str(entry["name"]).rstrip("/").rpartition("/")
            # An object that has the folder's own name is listed, too.
            if parent.strip("/") == place.strip("/"):
                found[name] = None if entry["type"] == "directory" else int(entry["size"])
        return found

    def read(self, name: str) -> bytes | None:
        """Gets the object."""
        try:
            return self._run("read", name, lambda: self._files.cat_file(self._at(name)))
        except Missing:
            return None

    def open(self, name: str) -> BinaryIO:
        """Gets the parts of the object that are read, when they are."""
        file = self._run(
            "read", name, lambda: self._files.open(self._at(name), "rb", cache_type="none")
        )
        remote = _Object(file, lambda read: self._run("read", name, read))
        remote.name = self._url_of(name)
        return io.BufferedReader(remote, buffer_size=_READ_BYTES)

    def modified(self, name: str) -> float | None:
        """The object's time of modification, as the server has it."""
        try:
            moment = self._run("read", name, lambda: self._files.modified(self._at(name)))
        except Missing:
            return None
        return moment.timestamp()

    def create(self, name: str, data: bytes) -> bool:
        """Puts the object if there is none."""
        return self._create(name, data, {})

    def replace(self, name: str, data: bytes) -> None:
        """Puts the object."""
        self._put(name, lambda: self._files.pipe_file(self._at(name), data))

    def publish(self, scratch: pathlib.Path, name: str, *, is_new: bool) -> bool:
        """Puts the scratch file's bytes whole."""
        try:
            size = scratch.stat().st_size
        except OSError as error:
            raise write_error(error, str(scratch)) from None
        whole = s3_uploads.whole(size) if self._is_s3 else {}
        if is_new:
            return self._publish_new(scratch, name, whole)
        self._put(name, lambda: self._files.put_file(str(scratch), self._at(name), **whole))
        scratch.unlink(missing_ok=True)
        return True

    def flush(self, name: str) -> None:
        """What an object store shows is durable."""

    def copy(self, name: str, other: str) -> None:
        """Has the server copy the object."""
        source, target = self._at(name), self._at(other)
        self._run("copy", name, lambda: self._files.cp_file(source, target))

    def delete(self, name: str) -> None:
        """Deletes the object."""
        with contextlib.suppress(Missing):
            self._run("delete", name, lambda: self._files.rm_file(self._at(name)))

    def append(self, name: str, data: bytes) -> None:
        """Creates the log's next object."""
        self._logs.append(name, data)

    def read_log(self, name: str) -> bytes | None:
        """Joins the log's objects."""
        return self._logs.read(name)

    def truncate(self, name: str, num_bytes: int) -> None:
        """Removes the log's last objects and shortens the one before."""
        self._logs.truncate(name, num_bytes)

    def delete_log(self, name: str) -> None:
        """Removes the log's objects."""
        self._logs.delete(name)

    def logs(self, folder: str) -> list[str]:
        """A log is a folder."""
        return self._logs.names(folder)

    def _create(self, name: str, data: bytes, how: dict[str, Any]) -> bool:
        # Equal bytes that are there already are taken for those of an earlier try.
        if not self.has_conditional_create:
            found = self.read(name)
            if found is None:
                self._put(name, lambda: self._files.pipe_file(self._at(name), data, **how))
            return found is None or found == data
        how = {**how, "mode": "create"}
        with contextlib.suppress(Exists):
            self._put(name, lambda: self._files.pipe_file(self._at(name), data, **how))
            return True
        return self.read(name) == data

    def _publish_new(self, scratch: pathlib.Path, name: str, whole: dict[str, Any]) -> bool:
        # In memory: not every library puts a file on such a condition, all of them put bytes.
        is_there = self._create(name, scratch.read_bytes(), whole)
        if is_there:
            scratch.unlink(missing_ok=True)
        return is_there

    def _probe(self) -> None:
        probe = f"{self._private}/probe-{uuid.uuid4().hex}"
        self.has_conditional_create = True
        try:
            self.create(probe, b"1")
            self.has_conditional_create = not self.create(probe, b"2")
        except Unsupported:
            self.has_conditional_create = False
            self.create(probe, b"1")
        self.delete(probe)
        if not self.has_conditional_create:
            self._note(
                f"{self.url}: this store overwrites objects even when asked not to; two jobs that "
                "begin to write here in the same moment are told apart by their lease alone"
            )

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes += (text,)

    def _put(self, name: str, call: Callable[[], Any]) -> None:
        try:
            self._run("write", name, call)
        except Missing:
            # Some servers say no more than this of a bucket.
            raise StorageError(
                f"cannot write {self._url_of(name)}: there is no such bucket; make it, or correct "
                "the URL"
            ) from None

    def _run(self, verb: str, name: str, call: Callable[[], _Result]) -> _Result:
        return self._calls.run(f"{verb} {self._url_of(name)}", call)

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}".rstrip("/")

    def _url_of(self, name: str) -> str:
        return f"{self._url}/{name}".rstrip("/")


class _Object(RemoteFile):
    """An open object, with what else is asked of a binary file."""

    name: str
    mode = "rb"

    def readall(self) -> bytes:
        """The rest, in one request rather than in thousands of small ones."""
        return self.read(-1)
