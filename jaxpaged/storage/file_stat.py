"""What is known of a file to read without its bytes, and which files are passed over."""

import dataclasses
import datetime
from typing import Literal

_HIDDEN = ("_", ".")

Kind = Literal["file", "folder", "other"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FileStat:
    """What a file is like, without its bytes.

    Attributes:
        kind: Whether it is one.
        size: Bytes.
        stamp: Differs whenever the bytes could differ.
        modified: When it was last modified, for people.
        etag: The store's own name for exactly these bytes; None where there is no such thing.
        changed_ns: The latest time that is in the stamp. A change within the same tick of the
            file system's clock leaves the stamp as it is; None if no change ever does.
    """

    kind: Kind
    size: int
    stamp: str
    modified: str
    etag: str | None = None
    changed_ns: int | None = None


def is_hidden(names: str) -> bool:
    """Whether any part of a relative path begins with "_" or "."."""
    return any(name.startswith(_HIDDEN) for name in names.split("/"))


def time_text(time_ns: int) -> str:
    """A moment, for people."""
    seconds, nanoseconds = divmod(time_ns, 1_000_000_000)
    moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{nanoseconds:09d}Z"
