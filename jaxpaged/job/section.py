"""What all sections of a job file have in common: strictness, and checks by who owns a range."""

import math
from typing import Annotated, Any

import pydantic
from pydantic import Field

from jaxpaged.errors import ConfigError

# YAML has lists, the frozen spec has tuples: their items are checked as strictly as all else.
Texts = Annotated[tuple[str, ...], Field(strict=False)]
TokenIds = Annotated[tuple[int, ...], Field(strict=False)]

# For the schema; what is checked has messages of its own.
NotEmpty = Annotated[str, Field(min_length=1)]

# pydantic.ValidationInfo, but for the tests' run-time type checks: it is a protocol they refuse.
FieldInfo = Any


class Section(pydantic.BaseModel):
    """A group of keys: nothing unknown, nothing converted, nothing changed later."""

    # What is written in the wrong place may be a secret: errors name the place alone.
    model_config = pydantic.ConfigDict(
        strict=True, extra="forbid", frozen=True, hide_input_in_errors=True
    )


def empty_if_null(value: object) -> object:
    """The value of a group of keys that has defaults: YAML's empty group is null."""
    return {} if value is None else value


def check_json(value: Any) -> Any:  # noqa: ANN401
    """`value` itself, once it is known to be made of what JSON has."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"expected names of variables, found {key!r}")
            check_json(item)
    elif isinstance(value, list):
        for item in value:
            check_json(item)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"expected a number that JSON knows, found {value!r}")
    elif value is not None and not isinstance(value, str | int | float):
        kind = type(value).__name__
        raise ValueError(f"expected texts, numbers, truth values, lists and maps, found a {kind}")
    return value


def check_by(owner: type, value: object, name: str | None) -> object:
    """`value`, once the dataclass that owns the field's range has accepted it."""
    if name is not None and name in owner.__dataclass_fields__:
        try:
            owner(**{name: value})
        except ConfigError as error:
            raise ValueError(str(error)) from None
    return value
