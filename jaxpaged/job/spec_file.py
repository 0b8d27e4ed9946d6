"""A job file together with the overrides of the command line, as one document.

Knows YAML and dotted keys, not what the keys mean.
"""

import pathlib
from collections.abc import Sequence

from jaxpaged.errors import ConfigError
from jaxpaged.job import yaml_file
from jaxpaged.job.yaml_file import KeyPath, YamlDocument

_NULLS = ("", "~", "null", "Null", "NULL")


def read(path: pathlib.Path, overrides: Sequence[str] = ()) -> YamlDocument:
    """The job file's document with every `key.sub=value` of `overrides` put in its place.

    Raises:
        ConfigError: The file is not strict YAML, holds no keys, or an override is malformed.
    """
    document = yaml_file.load(path)
    if not isinstance(document.value, dict):
        raise ConfigError(
            f"{path}: expected keys such as model, input and output, found "
            f"{'an empty file' if document.value is None else 'something else'}"
        )
    job: dict[str, object] = document.value
    places = dict(document.places)
    for override in overrides:
        _apply(job, places, override)
    return YamlDocument(value=job, places=places)


def parse_override(text: str, option: str = "--set") -> tuple[str, object]:
    """Key and value of a `key.sub=value`.

    Raises:
        ConfigError: It is malformed; the message says of which option it is.
    """
    key, value = _split(text, option)
    return key, _parse(value, f"{option} {key}").value


def put(job: dict[str, object], key: str, value: object, option: str = "--set") -> None:
    """Puts a value at a dotted key, in the place of what is there.

    Raises:
        ConfigError: A part of the key in front of the last is no section.
    """
    *sections, last = key.split(".")
    target = job
    for depth, name in enumerate(sections, start=1):
        child = target.setdefault(name, {})
        if child is None:
            child = target[name] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"{option} {key}: {'.'.join(sections[:depth])} has no keys inside")
        target = child
    target[last] = value


def _apply(job: dict[str, object], places: dict[KeyPath, str], override: str) -> None:
    key, text = _split(override, "--set")
    value = _parse(text, f"--set {key}")
    put(job, key, value.value)
    _replace_places(places, tuple(key.split(".")), value, f"--set {key}")


def _split(override: str, option: str) -> tuple[str, str]:
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not all(key.split(".")):
        # What comes behind the sign may be a secret.
        raise ConfigError(f"{option} {key}: expected key=value, as in sampling.max_tokens=64")
    return key, text


def _parse(text: str, where: str) -> YamlDocument:
    """The value as YAML; what YAML cannot read, or would read as less than all of it, is text.

    So `Say {{ q }} # now?`, `[INST] {{ q }}` and `*.parquet` need no quotes beside the shell's.
    """
    verbatim = YamlDocument(value=text, places={})
    if text.lstrip().startswith(("{{", "{%")):
        return verbatim
    try:
        parsed = yaml_file.parse(text, where)
    except ConfigError:
        return verbatim
    is_quoted = text.lstrip().startswith(("'", '"'))
    is_cut = parsed.value is None and text.strip() not in _NULLS
    return verbatim if is_cut or (isinstance(parsed.value, str) and not is_quoted) else parsed


def _replace_places(
    places: dict[KeyPath, str], keys: KeyPath, value: YamlDocument, where: str
) -> None:
    for path in [path for path in places if path[: len(keys)] == keys]:
        del places[path]
    for depth in range(1, len(keys)):
        places.setdefault(keys[:depth], where)
    places[keys] = where
    places.update(dict.fromkeys(((*keys, *path) for path in value.places), where))
