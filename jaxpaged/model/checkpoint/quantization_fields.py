"""Typed look-ups in a `quantization_config`: what it asks for is read, or refused by name."""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

from jaxpaged.errors import CheckpointError
from jaxpaged.model.shown import shown

_log = logging.getLogger(__name__)

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationFields:
    """An object of a `quantization_config`.

    Attributes:
        values: Key to value.
        where: Names the file, and the object in it, in errors.
    """

    values: Mapping[str, Any]
    where: str

    def check_keys(self, honoured: frozenset[str], without_effect: frozenset[str]) -> None:
        """Remarks on keys that are neither: nobody here knows what they ask for."""
        unknown = sorted(self.values.keys() - honoured - without_effect)
        if unknown:
            _log.warning("%s: unknown keys are ignored: %s", self.where, shown(unknown))

    def one_of(self, key: str, supported: tuple[_T, ...]) -> _T:
        """The value under a key, which must be one of those; None is for a key that is absent."""
        value = self.values.get(key)
        for one in supported:
            if type(value) is type(one) and value == one:
                return one
        return self.fail(key, "one of " + ", ".join(map(repr, supported)) + ", which can be read")

    def group_size(self) -> int:
        """How many inputs share a scale; -1 for all of them."""
        value = self.values.get("group_size")
        if type(value) is int and (value == -1 or 0 < value < 2**31):
            return value
        return self.fail("group_size", "a whole number above 0, or -1")

    def block(self, key: str) -> tuple[int, int] | None:
        """Outputs and inputs of a block, or None when the key is absent."""
        value = self.values.get(key)
        if value is None:
            return None
        sizes = value if isinstance(value, list) else []
        if len(sizes) == 2 and all(type(size) is int and 0 < size < 2**31 for size in sizes):
            return sizes[0], sizes[1]
        return self.fail(key, "two whole numbers above 0")

    def object(self, key: str) -> "QuantizationFields":
        """The object under a key."""
        value = self.values.get(key)
        if not isinstance(value, Mapping):
            self.fail(key, "an object")
        return QuantizationFields(values=value, where=f"{self.where}: {key}")

    def objects(self, key: str) -> list["QuantizationFields"]:
        """The objects in the object under a key."""
        holder = self.object(key)
        return [holder.object(name) for name in holder.values]

    def fail(self, key: str, expected: str) -> NoReturn:
        """Raises the error that `key` is not what it should be."""
        raise CheckpointError(
            f"{self.where}: {key} is {shown(self.values.get(key))}; expected {expected}; take "
            "another version of the model, for instance one that is not quantised"
        )
