"""A local folder as a store: write aside, flush, rename or link, flush the folder.

    replace   write aside -> flush -> rename            -> flush the folder
    create    write aside -> flush -> link, which fails -> flush the folder -> remove the aside
                                      if the name exists
    publish                  flush -> rename            -> flush the folder

With durability "machine" every step is flushed, so that the order on the disk is this one even
when the power fails. With "process" nothing is: the order holds for other processes, and a power
loss may cost what the system had not written yet.
"""

import contextlib
import errno
import fcntl
import filecmp
import os
import pathlib
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, BinaryIO, Literal

from jaxpaged.errors import ConfigError, JaxPagedError, OutputConflictError, StorageError
from jaxpaged.storage.disk import Disk
from jaxpaged.storage.store import Entries

Durability = Literal["machine", "process"]

# Where hard links do not exist, the lock alone keeps a name from being created twice.
_LOCK_TRIES = 25
_LOCK_PAUSE = 0.02

_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class LocalStore:
    """The files under a folder; see `Store` for the methods.

    Args:
        path: The folder; made by `lock`.
        private: The name of the folder in it that holds the lock and what is not finished.
        durability: What a finished step survives: the end of the "machine" or of the "process".
        disk: How files are touched.
    """

    excludes_writers = True
    notes: tuple[str, ...] = ()

    def __init__(
        self,
        path: pathlib.Path,
        *,
        private: str,
        durability: Durability = "machine",
        disk: Disk | None = None,
    ) -> None:
        self.path = path
        self._lock_path = path / private / "lock"
        self._aside = path / private / "tmp"
        self._is_durable = durability == "machine"
        self._disk = disk or Disk()
        self._lock: IO[bytes] | None = None

    @property
    def url(self) -> str:
        """The folder's path."""
        return str(self.path)

    def lock(self) -> bool:
        """Takes the lock file's flock, which ends with the process, however it ends."""
        try:
            self._make_folder(self._aside)
            lock = self._lock_path.open("ab")
        except OSError as error:
            raise ConfigError(f"output.path: cannot write to {self.path}: {_why(error)}") from None
        try:
            is_mine = _takes(lock)
        except OSError as error:
            lock.close()
            raise ConfigError(
                f"output.path: {self._lock_path} cannot be locked: {_why(error)}; choose a folder "
                "on a file system that has locks"
            ) from None
        if not is_mine:
            lock.close()
            return False
        self._lock = lock
        return True

    def is_locked(self) -> bool | None:
        """Tries the lock for a moment; None if it cannot even be tried."""
        try:
            with self._lock_path.open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        except OSError:
            return None
        return False

    def unlock(self) -> None:
        """Closes the lock file."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def sweep(self) -> None:
        """Empties the folder of unfinished files."""
        # Finds nothing, rather than fail, if the folder was deleted under a running job.
        with self._writing():
            for path in sorted(self._aside.glob("*")):
                self._disk.unlink(path)

    def scratch(self, name: str) -> pathlib.Path:
        """A path on the same file system, so that publishing is a rename.

        Its suffix keeps it out of patterns such as `**/*.parquet`.
        """
        return self._aside / f"{name.replace('/', '-')}.tmp"

    def entries(self, folder: str = "") -> Entries:
        """Lists the folder; a link counts as what it leads to."""
        found: Entries = {}
        with self._reading():
            try:
                with os.scandir(self.path / folder) as listing:
                    for entry in sorted(listing, key=lambda entry: entry.name):
                        with contextlib.suppress(FileNotFoundError):  # gone since it was listed
                            found[entry.name] = _size(entry)
            except FileNotFoundError:
                return {}
            except NotADirectoryError:
                raise self._in_the_way(folder) from None
        return found

    def read(self, name: str) -> bytes | None:
        """Reads the file."""
        with self._reading():
            try:
                return (self.path / name).read_bytes()
            except FileNotFoundError:
                return None

    def open(self, name: str) -> BinaryIO:
        """Opens the file."""
        with self._reading():
            return (self.path / name).open("rb")

    def modified(self, name: str) -> float | None:
        """The file's modification time."""
        with self._reading():
            try:
                return (self.path / name).stat().st_mtime
            except FileNotFoundError:
                return None

    def create(self, name: str, data: bytes) -> bool:
        """Links a file written aside to its name: whole from the first moment, never over one."""
        path, aside = self.path / name, self.scratch(name)
        with self._writing():
            self._write_aside(aside, path, data)
            is_new = self._link(aside, path)
            # A name that was there may be of a process that ended before it flushed the folder.
            self._sync(path.parent)
            self._disk.unlink(aside)
            return is_new or path.read_bytes() == data

    def replace(self, name: str, data: bytes) -> None:
        """Renames a file written aside over the name."""
        path, aside = self.path / name, self.scratch(name)
        with self._writing():
            self._write_aside(aside, path, data)
            self._disk.rename(aside, path)
            self._sync(path.parent)

    def publish(self, scratch: pathlib.Path, name: str, *, is_new: bool) -> bool:
        """Renames the scratch file to the name."""
        path = self.path / name
        with self._writing():
            # No other writer can come in between: this one has the lock.
            if is_new and path.exists():
                return filecmp.cmp(scratch, path, shallow=False)
            self._make_folder(path.parent)
            self._sync(scratch)
            self._disk.rename(scratch, path)
            self._sync(path.parent)
        return True

    def flush(self, name: str) -> None:
        """Flushes the file and its folder."""
        path = self.path / name
        with self._writing():
            self._sync(path)
            self._sync(path.parent)

    def copy(self, name: str, other: str) -> None:
        """Links the file; copies it where there are no links."""
        path, target, aside = self.path / name, self.path / other, self.scratch(other)
        with self._writing():
            self._make_folder(target.parent)
            self._disk.unlink(aside)
            try:
                self._disk.link(path, aside)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                shutil.copyfile(path, aside)
            self._sync(aside)
            self._disk.rename(aside, target)
            # Renaming one link of a file over another leaves both.
            self._disk.unlink(aside)
            self._sync(target.parent)

    def delete(self, name: str) -> None:
        """Removes the file."""
        path = self.path / name
        with self._writing():
            self._disk.unlink(path)
            if path.parent.exists():
                self._sync(path.parent)

    def append(self, name: str, data: bytes) -> None:
        """Writes behind the end of the file."""
        path = self.path / name
        with self._writing():
            is_new = not path.exists()
            self._make_folder(path.parent)
            self._disk.append(path, data)
            self._sync(path)
            if is_new:
                self._sync(path.parent)

    def read_log(self, name: str) -> bytes | None:
        """A log is a file."""
        return self.read(name)

    def truncate(self, name: str, num_bytes: int) -> None:
        """Cuts the file."""
        path = self.path / name
        with self._writing():
            self._disk.truncate(path, num_bytes)
            self._sync(path)

    def delete_log(self, name: str) -> None:
        """A log is a file."""
        self.delete(name)

    def logs(self, folder: str) -> list[str]:
        """A log is a file."""
        return [name for name, size in self.entries(folder).items() if size is not None]

    def _in_the_way(self, folder: str) -> JaxPagedError:
        if folder:
            return StorageError(f"{self.path / folder} is a file; nothing of ours, move it away")
        if self.path.exists():
            return OutputConflictError(f"output.path: {self.path} is a file; choose a folder")
        return ConfigError(f"output.path: {self.path} lies below a file; choose another folder")

    def _link(self, aside: pathlib.Path, path: pathlib.Path) -> bool:
        """Gives the file aside its name; False if the name is taken."""
        try:
            self._disk.link(aside, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            if path.exists():
                return False
            self._disk.rename(aside, path)
        return True

    def _write_aside(self, aside: pathlib.Path, path: pathlib.Path, data: bytes) -> None:
        self._make_folder(path.parent)
        if aside.exists():
            # Left by a write that failed; it may be a second link of what is visible by now.
            self._disk.unlink(aside)
        self._disk.write(aside, data)
        self._sync(aside)

    def _make_folder(self, path: pathlib.Path) -> None:
        new = [folder for folder in (path, *path.parents) if not folder.is_dir()]
        if new:
            self._disk.make_folder(path)
        for folder in reversed(new):
            self._sync(folder.parent)

    def _sync(self, path: pathlib.Path) -> None:
        if self._is_durable:
            self._disk.sync(path)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise write_error(error, self.url) from None

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            where = error.filename or self.url
            raise StorageError(
                f"cannot read {where}: {_why(error)}; make it readable and run the command again"
            ) from None


def _takes(lock: IO[bytes]) -> bool:
    """Takes the lock, unless it stays taken.

    Whoever only looks whether it is taken has it for a moment.
    """
    for _ in range(_LOCK_TRIES):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(_LOCK_PAUSE)
    return False


def write_error(error: OSError, place: str) -> StorageError:
    """What to tell a user whose output could not be written."""
    return StorageError(
        f"cannot write to {error.filename or place}: {_why(error)}; finished parts are kept, once "
        "this is mended running the job again continues"
    )


def _why(error: OSError) -> str:
    return error.strerror or (str(error).splitlines() or [type(error).__name__])[0]


def _size(entry: os.DirEntry[str]) -> int | None:
    try:
        return None if entry.is_dir() else entry.stat().st_size
    except OSError:
        # A link that leads nowhere is in the way all the same.
        return entry.stat(follow_symlinks=False).st_size
