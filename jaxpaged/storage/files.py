"""Files to read, wherever they are: on local disks, or in an object store under a URL.

A place is an absolute path or a URL, as text. Knows sizes, stamps and bytes, nothing of what is in
the files. The libraries for URLs are loaded when the first URL is met.
"""

import io
import os
import pathlib
import stat
from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from jaxpaged.errors import InputSchemaError
from jaxpaged.storage.file_stat import FileStat, is_hidden, time_text
from jaxpaged.storage.options import StorageOptions

OpenFile = io.BufferedReader | io.RawIOBase
"""A file to read and seek in; `read(n)` gives all n bytes unless the file ends."""


@runtime_checkable
class _Files(Protocol):
    """What both kinds of files can do. Every method raises OSError."""

    def folder(self, path: str) -> str: ...

    def stat(self, place: str) -> FileStat: ...

    def open(self, place: str) -> OpenFile: ...

    def walk(self, folder: str) -> Iterator[str]: ...

    def glob(self, folder: str, pattern: str) -> Iterator[str]: ...


class SourceFiles:
    """The files a job reads.

    Every method raises OSError, with the reason in `strerror`, if a place cannot be read, and
    FileNotFoundError if nothing is there.

    Args:
        options: How object stores are reached.
    """

    def __init__(self, options: StorageOptions | None = None) -> None:
        self._options = options or StorageOptions()
        self._local = _LocalFiles()
        self._remote: _Files | None = None

    def folder(self, path: str) -> str:
        """The place of a folder, without a "/" at its end; links are followed."""
        return self._of(path).folder(path)

    def stat(self, place: str) -> FileStat:
        """What is at a place."""
        return self._of(place).stat(place)

    def open(self, place: str) -> OpenFile:
        """A file's bytes; the caller closes it."""
        return self._of(place).open(place)

    def walk(self, folder: str) -> Iterator[str]:
        """All files under a folder but those with a name that begins with "_" or "." on the way.

        Raises:
            InputSchemaError: There is a link to a folder, which is not followed.
        """
        return self._of(folder).walk(folder)

    def glob(self, folder: str, pattern: str) -> Iterator[str]:
        """The files under a folder that match, hidden ones left out as in `walk`."""
        return self._of(folder).glob(folder, pattern)

    def _of(self, place: str) -> _Files:
        if not is_remote(place):
            return self._local
        if self._remote is None:
            # Loads fsspec and the store's client, which a job on local files does without.
            from jaxpaged.storage.remote_files import RemoteFiles

            self._remote = RemoteFiles(self._options)
        return self._remote


def is_remote(place: str) -> bool:
    """Whether a place is a URL."""
    return "://" in place


class _LocalFiles:
    """Files of this machine's file systems; see `SourceFiles` for the methods."""

    def folder(self, path: str) -> str:
        return str(pathlib.Path(path).resolve()).rstrip("/")

    def stat(self, place: str) -> FileStat:
        status = os.stat(place or "/")  # noqa: PTH116  (the place "" is the root)
        is_folder, is_file = stat.S_ISDIR(status.st_mode), stat.S_ISREG(status.st_mode)
        stamp = (
            status.st_size,
            status.st_mtime_ns,
            # Cannot be set back, unlike the time of modification.
            status.st_ctime_ns,
            status.st_ino,
            status.st_dev,
        )
        return FileStat(
            kind="file" if is_file else "folder" if is_folder else "other",
            size=status.st_size,
            stamp=":".join(map(str, stamp)),
            modified=time_text(status.st_mtime_ns),
            changed_ns=max(status.st_mtime_ns, status.st_ctime_ns),
        )

    def open(self, place: str) -> OpenFile:
        return pathlib.Path(place).open("rb")

    def walk(self, folder: str) -> Iterator[str]:
        # Unlike a glob it fails at a folder it cannot read.
        for entry in pathlib.Path(folder or "/").iterdir():
            if is_hidden(entry.name):
                continue
            if not entry.is_dir():
                yield str(entry)
            elif entry.is_symlink():
                raise InputSchemaError(
                    f"input.path: {entry} is a link to a folder, which is not followed; list the "
                    "folder itself in input.path"
                )
            else:
                yield from self.walk(str(entry))

    def glob(self, folder: str, pattern: str) -> Iterator[str]:
        root = pathlib.Path(folder or "/")
        for path in root.glob(pattern):
            if path.is_file() and not is_hidden(path.relative_to(root).as_posix()):
                yield str(path)
