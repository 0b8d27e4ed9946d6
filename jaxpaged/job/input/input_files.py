"""Which files an input path means: a file, a folder, a glob, or a list of these, expanded once.

Knows places and names only; what is in the files is the input plan's.
"""

import pathlib
import re
from collections.abc import Sequence
from pathlib import PurePosixPath

from jaxpaged.errors import ConfigError, InputSchemaError
from jaxpaged.storage.files import SourceFiles, is_remote

_SUFFIXES = (".parquet", ".parq", ".pq")
_GLOB = re.compile(r"[*?\[]")


def find(paths: Sequence[str], files: SourceFiles, known: Sequence[str] = ()) -> dict[str, str]:
    """The places of the input files by their names, in the order in which their rows are read.

    The entries of a list keep their order; the files of a folder or glob are sorted by name. A
    name is the file's path relative to the deepest folder that holds all of the input, so that
    the input can be moved without changing the names. Names that begin with "_" or "." are
    skipped in folders and globs, as by every reader of Parquet folders.

    Args:
        paths: The entries of the list.
        files: Where they are looked for.
        known: Names that files had in an earlier run. They keep them: when a folder is added to
            the input, names are relative to the folder they were relative to before.

    Raises:
        ConfigError: Some of the paths are local and others are not.
        InputSchemaError: A path leads to nothing, to nothing readable, or to a file twice.
    """
    _check_one_kind(paths)
    entries = [_expand(path, files) for path in paths]
    places = [place for _, found in entries for place in found]
    root = _root([folder for folder, _ in entries], places, known)
    by_name: dict[str, str] = {}
    for place in places:
        name = _relative(place, root)
        if not _is_unicode(name):
            raise InputSchemaError(f"input.path: {name!a} is not a UTF-8 name; rename the file")
        if name in by_name:
            raise InputSchemaError(f"input.path: {place} is listed twice; list each file once")
        by_name[name] = place
    return by_name


def check_output_apart(paths: Sequence[str], output: str, files: SourceFiles) -> None:
    """Refuses an output folder that is, holds, or lies inside the input.

    Raises:
        ConfigError: Input and output overlap; the message names both.
    """
    target = PurePosixPath("/" + files.folder(output).lstrip("/"))
    for path in paths:
        if _scheme(path) != _scheme(output):
            continue
        try:
            source, pattern = _split_glob(path, files) or (files.folder(path), None)
        except OSError as error:
            raise _unreadable(path, error) from None
        clash = _clash(PurePosixPath("/" + source.lstrip("/")), pattern, target)
        if clash:
            raise ConfigError(
                f"output.path: {output} {clash} the input {path}; choose a folder apart from it"
            )


def _check_one_kind(paths: Sequence[str]) -> None:
    first, *others = paths
    for path in others:
        if _scheme(path) != _scheme(first):
            raise ConfigError(
                f"input.path: {first} and {path} lie in different kinds of storage; copy the input "
                "to one"
            )


def _scheme(path: str) -> str:
    return path.split("://", 1)[0] if is_remote(path) else ""


def _clash(source: PurePosixPath, pattern: str | None, output: PurePosixPath) -> str | None:
    if output == source and pattern is None:
        return "is"
    if source.is_relative_to(output):
        return "holds"
    if not output.is_relative_to(source):
        return None
    part = (output / "part-000000.parquet").relative_to(source)
    if pattern is None or "**" in pattern:
        return "lies inside"
    is_match = len(part.parts) == len(PurePosixPath(pattern).parts) and part.match(pattern)
    return "lies inside" if is_match else None


def _expand(path: str, files: SourceFiles) -> tuple[str, list[str]]:
    """The folder that names of `path` are relative to, and the files `path` means."""
    try:
        glob = _split_glob(path, files)
        if glob is not None:
            folder, pattern = glob
            found = list(files.glob(folder, pattern))
            problem = "no file matches"
        elif files.stat(path).kind == "folder":
            folder = files.folder(path)
            found = [file for file in files.walk(folder) if file.lower().endswith(_SUFFIXES)]
            problem = f"no {' or '.join(_SUFFIXES)} file in the folder"
        else:
            parent, name = _split_name(path)
            folder = files.folder(parent)
            found = [f"{folder}/{name}"]
            problem = ""
    except FileNotFoundError:
        raise InputSchemaError(f"input.path: {path} does not exist") from None
    except OSError as error:
        raise _unreadable(path, error) from None
    if not found:
        raise InputSchemaError(f"input.path: {problem} {path}")
    return folder, sorted(found)


def _unreadable(path: str, error: OSError) -> InputSchemaError:
    where = error.filename or path
    return InputSchemaError(f"input.path: cannot read {where}: {error.strerror or error}")


def _split_glob(path: str, files: SourceFiles) -> tuple[str, str] | None:
    """The folder in front of the first wildcard and the pattern behind it; None if there is none.

    A file whose very name has such characters is that file.
    """
    if not _GLOB.search(path) or _exists(path, files):
        return None
    parts = path.split("/")
    first = next(index for index, part in enumerate(parts) if _GLOB.search(part))
    if is_remote(path) and first < len(("s3:", "", "bucket")):
        raise InputSchemaError(f"input.path: {path} has a wildcard in its bucket; name the bucket")
    pattern = "/".join(part for part in parts[first:] if part)
    return files.folder("/".join(parts[:first]) or ("/" if first else ".")), pattern


def _split_name(path: str) -> tuple[str, str]:
    if is_remote(path):
        folder, _, name = path.rpartition("/")
        return folder, name
    return str(pathlib.Path(path).parent), pathlib.Path(path).name


def _exists(path: str, files: SourceFiles) -> bool:
    try:
        files.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _root(folders: Sequence[str], places: Sequence[str], known: Sequence[str]) -> str:
    """The folder that names are relative to: the one that gives most files the names they had."""
    common = _common(folders)
    there = set(places)

    def num_kept(root: str) -> int:
        return sum(f"{root}/{name}" in there for name in known)

    if num_kept(common) == len(known):
        return common
    for name in known:
        candidates = [place[: -len(name) - 1] for place in places if place.endswith(f"/{name}")]
        if candidates:
            return max([common, *candidates], key=num_kept)
    return common


def _common(folders: Sequence[str]) -> str:
    first, *others = (folder.split("/") for folder in folders)
    depth = len(first)
    while any(other[:depth] != first[:depth] for other in others):
        depth -= 1
    return "/".join(first[:depth])


def _relative(place: str, root: str) -> str:
    """The path from a folder to a file, through the folders above if need be."""
    target, origin = place.split("/"), root.split("/")
    shared = 0
    while shared < len(origin) and origin[shared] == target[shared]:
        shared += 1
    return "/".join([".."] * (len(origin) - shared) + target[shared:])


def _is_unicode(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
