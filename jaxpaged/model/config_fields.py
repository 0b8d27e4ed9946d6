"""Typed look-ups in one parsed JSON object, with errors that name the file and the key."""

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

from jaxpaged.errors import CheckpointError
from jaxpaged.model.shown import shown


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """An object of a `config.json`; a key whose value is null counts as absent.

    Attributes:
        values: Key to value.
        where: Names the file, and the object in it, in errors.
    """

    values: Mapping[str, Any]
    where: str

    def size(self, key: str, default: int | None = None) -> int:
        """A whole number above 0."""
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
            self.fail(key, "a whole number above 0")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number, 0 included."""
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
            self.fail(key, "a whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self._value(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            self.fail(key, "a number")
        # Whole numbers have no end in JSON.
        if not 0.0 < value <= sys.float_info.max:
            self.fail(key, "a finite number above 0")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """A truth value."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            self.fail(key, "true or false")
        return value

    def fail(self, key: str, expected: str) -> NoReturn:
        """Raises the error that `key` is not what it should be."""
        found = shown(self.values.get(key))
        raise CheckpointError(f"{self.where}: {key} is {found}; expected {expected}")

    def _value(self, key: str, default: object) -> object:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"{self.where}: {key} is missing; the model needs it")
        return value
