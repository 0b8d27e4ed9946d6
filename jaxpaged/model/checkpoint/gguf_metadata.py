"""Typed look-ups in the metadata of a GGUF file, with errors that name the file and the key."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NoReturn, TypeVar

from jaxpaged.errors import CheckpointError
from jaxpaged.model.checkpoint.gguf_header import Value

_T = TypeVar("_T", str, int, float)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """The metadata of one file.

    Attributes:
        values: Key to value.
        where: Names the file in errors.
    """

    values: Mapping[str, Value]
    where: str

    def text(self, key: str) -> str:
        """The text under a key that must be there."""
        value = self.values.get(key)
        return value if isinstance(value, str) else self.fail(key, "text")

    def flag(self, key: str, default: bool) -> bool:
        """The truth value under a key."""
        value = self.values.get(key, default)
        return value if isinstance(value, bool) else self.fail(key, "a truth value")

    def index(self, key: str, below: int) -> int | None:
        """The whole number from 0 under a key, or None when the key is absent."""
        value = self.values.get(key)
        if value is None or (type(value) is int and 0 <= value < below):
            return value
        return self.fail(key, f"a whole number from 0 and below {below}")

    def list_of(self, kind: type[_T], key: str, default: Sequence[_T] | None = None) -> list[_T]:
        """The list under a key, all of one type; without a default it must be there."""
        value = self.values.get(key, default)
        if isinstance(value, Sequence) and all(type(item) is kind for item in value):
            return list(value)  # type: ignore
        return self.fail(key, f"a list of {kind.__name__}")

    def fail(self, key: str, expected: str) -> NoReturn:
        """Raises the error that `key` is not what it should be."""
        found = repr(self.values[key])[:60] if key in self.values else "missing"
        raise CheckpointError(f"{self.where}: {key} is {found}; expected {expected}")
