"""Which files an input path means: a file, a folder, a glob, or a list of these, expanded once.

Knows paths and names only; what is in the files is the input plan's.
"""

import pathlib
import re
from collections.abc import Iterator, Sequence

from jaxpaged.errors import ConfigError, InputSchemaError

_SUFFIXES = (".parquet", ".parq", ".pq")
_HIDDEN = ("_", ".")
_GLOB = re.compile(r"[*?\[]")


def find(paths: Sequence[str]) -> list[tuple[str, pathlib.Path]]:
    """The input files with their names, in the order in which their rows are read.

    The entries of a list keep their order; the files of a folder or glob are sorted by name. A
    name is the file's path relative to the deepest folder that holds all of the input, so that
    the input can be moved without changing the names. Names that begin with "_" or "." are
    skipped in folders and globs, as by every reader of Parquet folders.

    Raises:
        InputSchemaError: A path leads to nothing, to nothing readable, or to a file twice.
    """
    entries = [_expand(path) for path in paths]
    root = _common([folder for folder, _ in entries])
    found: dict[str, pathlib.Path] = {}
    for _, files in entries:
        for file in files:
            name = file.relative_to(root).as_posix()
            if not _is_unicode(name):
                raise InputSchemaError(f"input.path: {name!a} is not a UTF-8 name; rename the file")
            if name in found:
                raise InputSchemaError(f"input.path: {file} is listed twice; list each file once")
            found[name] = file
    return list(found.items())


def check_output_apart(paths: Sequence[str], output: pathlib.Path) -> None:
    """Refuses an output folder that is, holds, or lies inside the input.

    Raises:
        ConfigError: Input and output overlap; the message names both.
    """
    for path in paths:
        folder, pattern = _split_glob(path)
        source = pathlib.Path(path) if pattern is None else folder
        clash = _clash(source.resolve(), pattern, output.resolve())
        if clash:
            raise ConfigError(
                f"output.path: {output} {clash} the input {path}; choose a folder apart from it"
            )


def _clash(source: pathlib.Path, pattern: str | None, output: pathlib.Path) -> str | None:
    if output == source and pattern is None:
        return "is"
    if source.is_relative_to(output):
        return "holds"
    if not output.is_relative_to(source):
        return None
    part = (output / "part-000000.parquet").relative_to(source)
    if pattern is None or "**" in pattern:
        return "lies inside"
    is_match = len(part.parts) == len(pathlib.PurePath(pattern).parts) and part.match(pattern)
    return "lies inside" if is_match else None


def _expand(path: str) -> tuple[pathlib.Path, list[pathlib.Path]]:
    """The folder that names of `path` are relative to, and the files `path` means."""
    try:
        folder, pattern = _split_glob(path)
        if pattern is not None:
            files = [file for file in folder.glob(pattern) if _is_visible_file(file, folder)]
            problem = "no file matches"
        elif (source := pathlib.Path(path)).is_dir():
            folder = source.resolve()
            files = list(_walk(folder))
            problem = f"no {' or '.join(_SUFFIXES)} file in the folder"
        else:
            source.stat()
            files = [folder / source.name]
            problem = ""
    except FileNotFoundError:
        raise InputSchemaError(f"input.path: {path} does not exist") from None
    except OSError as error:
        where = error.filename or path
        raise InputSchemaError(f"input.path: cannot read {where}: {error.strerror}") from None
    if not files:
        raise InputSchemaError(f"input.path: {problem} {path}")
    return folder, sorted(files, key=lambda file: file.relative_to(folder).as_posix())


def _split_glob(path: str) -> tuple[pathlib.Path, str | None]:
    """The folder in front of the first wildcard and the pattern behind it; None if there is none.

    A file whose very name has such characters is that file.
    """
    whole = pathlib.Path(path)
    if not _GLOB.search(path) or whole.exists():
        return whole.parent.resolve(), None
    first = next(index for index, part in enumerate(whole.parts) if _GLOB.search(part))
    folder = pathlib.Path(*whole.parts[:first]).resolve()
    return folder, pathlib.PurePath(*whole.parts[first:]).as_posix()


def _is_visible_file(file: pathlib.Path, folder: pathlib.Path) -> bool:
    names = file.relative_to(folder).parts
    return file.is_file() and not any(name.startswith(_HIDDEN) for name in names)


def _walk(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """The Parquet files under `folder`; unlike a glob, fails at a folder it cannot read."""
    for entry in folder.iterdir():
        if entry.name.startswith(_HIDDEN):
            continue
        if entry.is_dir():
            if entry.is_symlink():
                raise InputSchemaError(
                    f"input.path: {entry} is a link to a folder, which is not followed; list the "
                    "folder itself in input.path"
                )
            yield from _walk(entry)
        elif entry.suffix.lower() in _SUFFIXES:
            yield entry


def _is_unicode(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _common(folders: Sequence[pathlib.Path]) -> pathlib.Path:
    first, *others = folders
    for root in (first, *first.parents):
        if all(folder.is_relative_to(root) for folder in others):
            return root
    return pathlib.Path(first.anchor)
