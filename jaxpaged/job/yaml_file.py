"""Job files as plain values with the line of every key.

A strict subset of YAML 1.2: no anchors or aliases (a few hundred bytes of them can expand without
bound), no tags, no duplicate keys, one document, bounded size and depth. Scalars follow YAML 1.2's
core schema, so that `no` is text and `1e-3` a number; `010`, which YAML versions read as 8 or as
10, stays text and is refused wherever a number is expected. Knows nothing of what the keys mean.
"""

import dataclasses
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

import yaml
from yaml.composer import ComposerError
from yaml.reader import ReaderError

from jaxpaged.errors import ConfigError

MAX_BYTES = 1_000_000
MAX_DEPTH = 32

KeyPath = tuple[str | int, ...]

_TAG = "tag:yaml.org,2002:"
_FLOAT = r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
_SCALARS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9]{0,29})|0o[0-7]{1,30}|0x[0-9a-fA-F]{1,30}", list("-+0123456789")),
    ("float", rf"{_FLOAT}|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.0123456789")),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class YamlDocument:
    """A parsed document.

    Attributes:
        value: The document as dicts, lists and scalars.
        places: Where each key or list item stands, as "file:line", by its path from the root.
    """

    value: object
    places: Mapping[KeyPath, str]


def load(path: pathlib.Path) -> YamlDocument:
    """The document in a file; places name the file as `path` does.

    Raises:
        ConfigError: The file cannot be read, is too large, or is not the YAML described above.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text; is it a YAML job file?") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the job file: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_BYTES:,} bytes; is it a YAML job file?")
    return parse(text, str(path))


def parse(text: str, where: str) -> YamlDocument:
    """The document in a string; `where` names its origin in errors and places.

    Raises:
        ConfigError: The text is not the YAML described above; the message names the line.
    """
    try:
        node = _StrictLoader(text).get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        problem = ", ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{where}{line}: {problem}") from None
    except ReaderError as error:
        raise ConfigError(f"{where}: not YAML text: {error.reason}") from None
    places: dict[KeyPath, str] = {}
    value = None if node is None else _value(node, (), where, places)
    return YamlDocument(value=value, places=places)


class _StrictLoader(yaml.SafeLoader):
    """Composes nodes only, with YAML 1.2 scalars and without anchors, aliases and deep nesting."""

    yaml_implicit_resolvers = {}  # noqa: RUF012  (PyYAML's own attribute, replaced as a whole)
    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: object) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            self._refuse(event, "anchors (&) and aliases (*) are not supported; write it out")
        if getattr(event, "tag", None):
            self._refuse(event, f"tags are not supported, found {event.tag}")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._refuse(event, f"nested deeper than {MAX_DEPTH} levels")
        # The index of an item, or the key node of a value: PyYAML's stubs know only the first.
        node = super().compose_node(parent, index)  # pyright: ignore[reportArgumentType]
        self._depth -= 1
        return node

    def _refuse(self, event: yaml.Event, problem: str) -> NoReturn:
        raise ComposerError(None, None, problem, event.start_mark)


for _name, _pattern, _first in _SCALARS:
    _StrictLoader.add_implicit_resolver(f"{_TAG}{_name}", re.compile(rf"^(?:{_pattern})$"), _first)


def _value(
    node: yaml.Node, path: KeyPath, where: str, places: dict[KeyPath, str]
) -> dict[str, object] | list[object] | str | int | float | bool | None:
    if isinstance(node, yaml.MappingNode):
        mapping: dict[str, object] = {}
        for key, line, child in _items(node, where):
            if key in mapping:
                first = places[(*path, key)]
                raise ConfigError(f"{where}:{line}: duplicate key {key!r}; first at {first}")
            places[(*path, key)] = f"{where}:{line}"
            mapping[key] = _value(child, (*path, key), where, places)
        return mapping
    if isinstance(node, yaml.SequenceNode):
        children: Sequence[yaml.Node] = node.value
        for index, child in enumerate(children):
            places[(*path, index)] = f"{where}:{child.start_mark.line + 1}"
        return [_value(c, (*path, i), where, places) for i, c in enumerate(children)]
    return _scalar(node.tag.removeprefix(_TAG), node.value)


def _items(node: yaml.MappingNode, where: str) -> Iterator[tuple[str, int, yaml.Node]]:
    for key, child in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigError(f"{where}:{line}: a key must be a plain word; quote template braces")
        yield str(key.value), line, child


def _scalar(kind: str, text: str) -> str | int | float | bool | None:
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    if kind == "int":
        return int(text, 0)
    if kind == "float":
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text
