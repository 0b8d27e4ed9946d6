"""The few things done to local files, one method for each.

Apart, so that a test can put a disk in its place that is full, fails, or takes the process with it
at any step.
"""

import os
import pathlib


class Disk:
    """The real one. Every method raises OSError as the system does."""

    def write(self, path: pathlib.Path, data: bytes) -> None:
        """Makes a file of these bytes, or replaces what it held."""
        path.write_bytes(data)

    def append(self, path: pathlib.Path, data: bytes) -> None:
        """Adds to the end of a file, made if need be."""
        with path.open("ab") as file:
            file.write(data)

    def truncate(self, path: pathlib.Path, num_bytes: int) -> None:
        """Cuts a file."""
        os.truncate(path, num_bytes)

    def sync(self, path: pathlib.Path) -> None:
        """Has the disk hold what was written to a file, or the names in a folder."""
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def rename(self, path: pathlib.Path, target: pathlib.Path) -> None:
        """Gives a file another name, in the place of what had that name."""
        path.replace(target)

    def link(self, path: pathlib.Path, target: pathlib.Path) -> None:
        """Gives a file a second name, which must be free."""
        target.hardlink_to(path)

    def unlink(self, path: pathlib.Path) -> None:
        """Removes a file; fine if it is missing."""
        path.unlink(missing_ok=True)

    def make_folder(self, path: pathlib.Path) -> None:
        """Makes a folder and those it lies in; fine if it exists."""
        path.mkdir(parents=True, exist_ok=True)
