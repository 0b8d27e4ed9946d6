"""Files to read in an object store, through fsspec; see `SourceFiles` for the methods.

Every call is repeated while the store fails in passing. Nothing is cached: a look is a new look.
"""

import datetime
import errno
import io
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import fsspec

from jaxpaged.errors import InputSchemaError, StorageError
from jaxpaged.storage import access
from jaxpaged.storage.file_stat import FileStat, is_hidden, time_text
from jaxpaged.storage.options import StorageOptions
from jaxpaged.storage.remote_calls import RemoteCalls

Connect = Callable[[str, StorageOptions], tuple[fsspec.AbstractFileSystem, str]]

# In the order of how well they tell bytes apart; Google's own ETag is not among them, for it also
# changes with a file's labels.
_ETAGS = ("ETag", "md5Hash", "generation")
_TIMES = ("LastModified", "mtime", "updated", "modified", "created")

_Result = TypeVar("_Result")


class RemoteFiles:
    """Objects by their URLs.

    Args:
        options: How stores are reached.
        calls: How a call is made.
        connect: Gives the file system of a URL.
    """

    def __init__(
        self,
        options: StorageOptions,
        *,
        calls: RemoteCalls | None = None,
        connect: Connect = access.filesystem,
    ) -> None:
        self._options = options
        self._calls = calls or RemoteCalls()
        self._connect = connect
        self._systems: dict[str, fsspec.AbstractFileSystem] = {}

    def folder(self, path: str) -> str:
        """A URL is what it is."""
        return path.rstrip("/")

    def stat(self, place: str) -> FileStat:
        """Asks for the object's head, or whether there are objects under the prefix."""
        system, key = self._find(place)
        found = self._run("look at", place, lambda: system.info(key))
        if found["type"] != "file":
            return FileStat(kind="folder", size=0, stamp="", modified="")
        size, modified = int(found["size"]), _modified(found)
        tags = (str(found.get(name) or "").strip('"') for name in _ETAGS)
        etag = next((tag for tag in tags if tag), None)
        changed_ns = None
        if etag is None:
            # Without a time either, nothing tells that the bytes are still the same.
            changed_ns = time.time_ns() if modified is None else _nanoseconds(modified)
        written = "" if modified is None else time_text(_nanoseconds(modified))
        return FileStat(
            kind="file",
            size=size,
            stamp=f"{size}:{etag or ''}:{written}",
            modified=written,
            etag=etag,
            changed_ns=changed_ns,
        )

    def open(self, place: str) -> "RemoteFile":
        """Opens the object as it is now: s3fs refuses to read on in another one of this name."""
        system, key = self._find(place)
        # What is asked for is what is fetched; whoever reads has buffers of its own.
        raw: Any = self._run(
            "open", place, lambda: system.open(key, "rb", cache_type="none", block_size=1024**2)
        )
        return RemoteFile(raw, lambda call: self._run("read", place, call))

    def walk(self, folder: str) -> Iterator[str]:
        """Lists all objects under the prefix at once."""
        system, key = self._find(folder)
        found = self._run("list", folder, lambda: system.find(key, detail=True))
        yield from self._visible(found, folder, key)

    def glob(self, folder: str, pattern: str) -> Iterator[str]:
        """Lists the objects that match."""
        system, key = self._find(folder)
        found = self._run("list", folder, lambda: system.glob(f"{key}/{pattern}", detail=True))
        yield from self._visible(found, folder, key)

    def _visible(self, found: Any, folder: str, key: str) -> Iterator[str]:  # noqa: ANN401
        for name, info in found.items():
            # A name that ends in "/" stands for a folder in some stores' tools.
            is_inside = name.startswith(f"{key}/") and not name.endswith("/")
            if is_inside and info["type"] == "file" and not is_hidden(name[len(key) + 1 :]):
                yield f"{folder}/{name[len(key) + 1 :]}"

    def _find(self, place: str) -> tuple[fsspec.AbstractFileSystem, str]:
        scheme, _, path = place.partition("://")
        if scheme not in self._systems:
            bucket = path.split("/", 1)[0]
            self._systems[scheme], _ = self._connect(f"{scheme}://{bucket}", self._options)
        return self._systems[scheme], path.rstrip("/")

    def _run(self, what: str, place: str, call: Callable[[], _Result]) -> _Result:
        try:
            return self._calls.run(f"{what} {place}", call)
        except FileNotFoundError:
            failure: Exception = FileNotFoundError(errno.ENOENT, "it does not exist", place)
        except StorageError as error:
            failure = InputSchemaError(f"input.path: {error}")
        raise failure


class RemoteFile(io.RawIOBase):
    """An object's bytes; each `read` is one request.

    Args:
        raw: fsspec's file.
        run: Makes a call, again if need be.
    """

    def __init__(
        self,
        raw: Any,  # noqa: ANN401  (each store has a class of its own)
        run: Callable[[Callable[[], Any]], Any],
    ) -> None:
        super().__init__()
        self._raw = raw
        self._run = run

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """The place of the next byte."""
        return self._raw.tell()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Moves to a byte."""
        return self._raw.seek(offset, whence)

    def read(self, size: int = -1) -> bytes:
        """All bytes asked for, unless the object ends."""
        start = self._raw.tell()

        def fetch() -> bytes:
            self._raw.seek(start)
            return self._raw.read(size)

        return self._run(fetch)

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401  (whatever holds bytes)
        """Fills a buffer."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Closes fsspec's file, too."""
        if not self.closed:
            self._raw.close()
        super().close()


def _modified(info: dict[str, Any]) -> datetime.datetime | None:
    value = next((info[name] for name in _TIMES if info.get(name)), None)
    if isinstance(value, str):
        try:
            value = datetime.datetime.fromisoformat(value)
        except ValueError:
            return None
    return value if isinstance(value, datetime.datetime) else None


def _nanoseconds(moment: datetime.datetime) -> int:
    return int(moment.timestamp() * 1_000_000) * 1000
