"""What the job layer asks of the place its output lies in.

Two kinds give it: `LocalStore` (a folder: rename, hard link, fsync, flock) and `ObjectStore` (a
prefix of an object store: whole PUTs, conditional PUTs). Names are relative to the place, with
"/" between their parts.
"""

import pathlib
from typing import BinaryIO, Protocol, runtime_checkable

Entries = dict[str, int | None]
"""What lies directly in a folder: bytes by file name, None for a folder."""


@runtime_checkable
class Store(Protocol):
    """Named bytes. Every method raises StorageError when the place fails.

    Whoever reads at the same time, in whatever process, sees each name with its old bytes, with
    its new bytes, or not at all; never with a part of them. Logs (`append`, `truncate`) are the
    exception: they are for the writer alone.
    """

    @property
    def url(self) -> str:
        """The place, for people: a path or a URL; holds no credentials."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know of the place, a line each; known once it is locked."""
        ...

    @property
    def excludes_writers(self) -> bool:
        """Whether `lock` itself keeps every other writer out."""
        ...

    def lock(self) -> bool:
        """Makes the place, if need be, and this process its writer; False if another one is.

        Raises:
            ConfigError: The place cannot be made or written to at all.
        """
        ...

    def is_locked(self) -> bool | None:
        """Whether some process holds the lock now; None if this kind of store cannot tell."""
        ...

    def unlock(self) -> None:
        """Lets other writers in; fine without a lock."""
        ...

    def sweep(self) -> None:
        """Removes what an earlier writer left unfinished; for the writer alone."""
        ...

    def scratch(self, name: str) -> pathlib.Path:
        """A local path to write a file at before it is published; its folder exists."""
        ...

    def entries(self, folder: str = "") -> Entries:
        """What lies directly in a folder, sorted by name; nothing if it does not exist."""
        ...

    def read(self, name: str) -> bytes | None:
        """The bytes of a name; None if there are none."""
        ...

    def open(self, name: str) -> BinaryIO:
        """The bytes of a name, to read and seek in; a missing name is a StorageError."""
        ...

    def modified(self, name: str) -> float | None:
        """When a name was last written, in seconds of the store's own clock; None if missing."""
        ...

    def create(self, name: str, data: bytes) -> bool:
        """Writes a name that must not exist yet, whole and durable.

        Returns:
            Whether the name has these bytes now. False: it existed with other bytes, which stay.
        """
        ...

    def replace(self, name: str, data: bytes) -> None:
        """Writes a name, whole; at every moment there are the old bytes or the new ones."""
        ...

    def publish(self, scratch: pathlib.Path, name: str, *, is_new: bool) -> bool:
        """Makes a finished scratch file visible under a name, whole and durable; the scratch
        file is gone then.

        Args:
            scratch: The file.
            name: The name.
            is_new: The name must not exist yet; otherwise it may, and is replaced.

        Returns:
            Whether the name has these bytes now. False: it existed with other bytes, which stay.
        """
        ...

    def flush(self, name: str) -> None:
        """Makes durable what is visible under a name, whoever wrote it and whether it flushed."""
        ...

    def copy(self, name: str, other: str) -> None:
        """Gives another name the same bytes; a hard link where there are such."""
        ...

    def delete(self, name: str) -> None:
        """Removes a name; fine if it is missing."""
        ...

    def append(self, name: str, data: bytes) -> None:
        """Adds to the end of a log, made if need be, durably; a crash may leave a part of it."""
        ...

    def read_log(self, name: str) -> bytes | None:
        """All bytes of a log; None if there is none."""
        ...

    def truncate(self, name: str, num_bytes: int) -> None:
        """Cuts a log behind its first bytes."""
        ...

    def delete_log(self, name: str) -> None:
        """Removes a log; fine if it is missing."""
        ...

    def logs(self, folder: str) -> list[str]:
        """The names of the logs directly in a folder (without the folder), sorted."""
        ...
