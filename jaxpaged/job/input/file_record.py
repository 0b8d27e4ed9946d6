"""What a job remembers of an input file, so that a later run can tell whether it is the same.

Values only; looking at files is `file_content`'s.
"""

import dataclasses
from typing import Annotated, Any

import pydantic
from pydantic import Field

_Count = Annotated[int, Field(strict=True, ge=0)]
_Repeats = Annotated[int, Field(strict=True, ge=1)]
_Content = Annotated[str, Field(pattern=r"^(sha256:[0-9a-f]{64}|etag:.+)$")]
_Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """One input file as it was found.

    Two records are of the same file if name and content are equal; when it was written, and its
    stamp, may differ.

    Attributes:
        name: Its path relative to the input's root; part of its rows' addresses.
        bytes: Its size.
        content: Digest of all its bytes: "sha256:<hex>", or "etag:<etag>" where a store gives one.
        footer: SHA-256 of its Parquet footer.
        row_groups: Runs of row groups of the same length: rows of each, and how many there are.
        modified: When it was last modified, for people.
        stamp: Changes whenever its bytes could have changed.
        hashed_at: When its content was taken, in nanoseconds since 1970.
    """

    name: Annotated[str, Field(min_length=1)]
    bytes: _Count
    content: _Content
    footer: _Sha256
    row_groups: tuple[tuple[_Count, _Repeats], ...]
    modified: str
    stamp: str
    hashed_at: _Count

    @property
    def num_rows(self) -> int:
        """Rows of the file."""
        return sum(rows * count for rows, count in self.row_groups)

    def to_json(self) -> dict[str, Any]:
        """The record in JSON's types."""
        values = dataclasses.asdict(self)
        values["row_groups"] = [list(run) for run in self.row_groups]
        return values


def from_json(values: object) -> FileRecord:
    """The record that `to_json` gave.

    Raises:
        ValueError: It is something else; the message names the first value that is wrong.
    """
    try:
        return pydantic.TypeAdapter(FileRecord).validate_python(values)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the record of a file"
        raise ValueError(f"{where}: {first['msg']}") from None
