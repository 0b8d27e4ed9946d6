"""What is wrong with a job file, in words: every problem with its line, key and remedy."""

import difflib
import re
import typing
from collections.abc import Iterator, Mapping, Sequence

import pydantic
import pydantic_core

Location = tuple[str | int, ...]

# By pydantic's type of error: what was expected.
_EXPECTED = {
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "tuple_type": "a list",
    "model_type": "a group of keys",
    "string_too_short": "text that is not empty",
}


def explain(
    problems: Sequence[pydantic_core.ErrorDetails],
    schema: type[pydantic.BaseModel],
    *,
    where: str,
    places: Mapping[Location, str],
) -> str:
    """One message for all problems, in the order of the file.

    Args:
        problems: As pydantic lists them.
        schema: The model the job was checked against, for the names of valid keys.
        where: The job's origin, for problems without a line.
        places: "file:line" of the keys, by path.
    """
    placed = [(_place(problem["loc"], where, places), problem) for problem in problems]
    placed.sort(key=lambda pair: _line(pair[0]))
    lines = [f"{place}: {_sentence(problem, schema)}" for place, problem in placed]
    if len(lines) == 1:
        return lines[0]
    return f"{where} has {len(lines)} problems:" + "".join(f"\n  {line}" for line in lines)


def _place(location: Location, where: str, places: Mapping[Location, str]) -> str:
    for length in range(len(location), 0, -1):
        if location[:length] in places:
            return places[location[:length]]
    return where


def _line(place: str) -> int:
    number = place.rpartition(":")[2]
    return int(number) if number.isdecimal() else 0


def _sentence(problem: pydantic_core.ErrorDetails, schema: type[pydantic.BaseModel]) -> str:
    key = _dotted(problem["loc"])
    prefix = f"{key}: " if key else ""
    kind, found = problem["type"], problem["input"]
    if kind == "extra_forbidden":
        return f"{prefix}unknown key; {_remedy(problem['loc'], schema)}"
    if kind == "missing":
        return f"{prefix}required key is missing"
    if kind in _EXPECTED:
        return f"{prefix}expected {_EXPECTED[kind]}, found {_show(found)}{_hint(kind, found)}"
    message = problem["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    if kind != "value_error":
        nearest = difflib.get_close_matches(str(found), re.findall(r"'(.*?)'", message), n=1)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        return f"{prefix}expected {message}, found {_show(found)}{hint}"
    return prefix + message.removeprefix(f"{key} ").removeprefix(f"{key.rpartition('.')[2]} ")


def _dotted(location: Location) -> str:
    dotted = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return dotted.removeprefix(".")


def _show(value: object) -> str:
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict | list | tuple):
        return "keys" if isinstance(value, dict) else "a list"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _hint(kind: str, found: object) -> str:
    if kind == "string_type" and isinstance(found, bool | int | float):
        return "; put it in quotes if it is meant as text"
    if (
        kind == "bool_type"
        and isinstance(found, str)
        and found.lower() in ("yes", "no", "on", "off")
    ):
        return f"; write {'true' if found.lower() in ('yes', 'on') else 'false'}"
    if kind in ("int_type", "float_type") and isinstance(found, str) and found.isdecimal():
        return f"; write {int(found)}"
    return ""


def _remedy(location: Location, schema: type[pydantic.BaseModel]) -> str:
    """What to write instead of an unknown key: the nearest name here, or the section it is in."""
    name = str(location[-1])
    section = _section_at(location[:-1], schema)
    known = list(section.model_fields) if section else []
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if nearest:
        return f"did you mean {nearest[0]}?"
    for path, other in _sections(schema):
        if name in other.model_fields:
            return f"it belongs under {path}" if path else "it belongs at the top level"
    return f"valid keys here: {', '.join(known)}"


def _section_at(
    location: Location, schema: type[pydantic.BaseModel]
) -> type[pydantic.BaseModel] | None:
    dotted = ".".join(part for part in location if isinstance(part, str))
    return dict(_sections(schema)).get(dotted)


def _sections(
    schema: type[pydantic.BaseModel], path: str = ""
) -> Iterator[tuple[str, type[pydantic.BaseModel]]]:
    yield path, schema
    for name, field in schema.model_fields.items():
        child = _model_in(field.annotation)
        if child is not None:
            yield from _sections(child, f"{path}.{name}".removeprefix("."))


def _model_in(annotation: object) -> type[pydantic.BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return annotation
    inner = (_model_in(argument) for argument in typing.get_args(annotation))
    return next((model for model in inner if model is not None), None)
