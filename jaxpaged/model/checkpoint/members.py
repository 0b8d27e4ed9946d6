"""The files of a model folder: found inside it, bounded in size, and parsed.

Knows nothing of what they mean. Names come from untrusted files (a shard index), and a link may
point anywhere.
"""

import hashlib
import pathlib
from typing import Any

from jaxpaged.errors import CheckpointError
from jaxpaged.model.checkpoint import bounded_json
from jaxpaged.model.shown import shown

# What a repository cloned without Git LFS has in the place of its large files.
_LFS_POINTER = b"version https://git-lfs.github.com/"

# The largest vocabularies take 35 MiB and 3 million values.
_MAX_TEXT_BYTES = 128 * 2**20
_MAX_VALUES = 2**23


def member(folder: pathlib.Path, name: str) -> pathlib.Path | None:
    """The file `name` of the folder, or None when there is none.

    A link is followed only inside the folder, or from a snapshot of the Hugging Face cache to
    that cache's own `blobs`.

    Raises:
        CheckpointError: The name or its link leads out of the folder, or cannot be read.
    """
    if not name or name in (".", "..") or any(character in name for character in "/\\:\0"):
        raise CheckpointError(
            f"{folder}: {shown(name)} is not the plain name of a file inside the model folder"
        )
    path = folder / name
    try:
        if not path.is_file():
            return None
        target = path.resolve(strict=True)
        if any(target.is_relative_to(home) for home in _homes(folder)):
            return path
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    raise CheckpointError(
        f"{path} is a link to {target}, outside the model folder; copy the file into the folder"
    )


def inside(folder: pathlib.Path, subfolder: str, ending: str) -> list[pathlib.Path]:
    """The files of a folder in the folder whose names end so, by name; none if it is not there.

    Raises:
        CheckpointError: A link leads out of the model folder, or the folder cannot be read.
    """
    try:
        paths = sorted((folder / subfolder).glob(f"*{ending}"))
        for path in paths:
            target = path.resolve(strict=True)
            if not any(target.is_relative_to(home) for home in _homes(folder)):
                raise CheckpointError(
                    f"{path} is a link to {target}, outside the model folder; copy the file into "
                    "the folder"
                )
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{folder / subfolder}: cannot be read: {error}") from None
    return [path for path in paths if path.is_file()]


def check_downloaded(beginning: bytes, path: pathlib.Path) -> None:
    """Makes sure that a file is not the pointer that Git LFS leaves in its place.

    Raises:
        CheckpointError: It is, by its first bytes.
    """
    if beginning.startswith(_LFS_POINTER):
        raise CheckpointError(
            f"{path}: is not the file, but the pointer to it that Git LFS leaves; in the model's "
            "repository run: git lfs pull"
        )


def read_bytes(path: pathlib.Path) -> bytes:
    """The content of a configuration or tokenizer file.

    Raises:
        CheckpointError: The file cannot be read or is larger than such files are.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_TEXT_BYTES + 1)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    check_downloaded(content, path)
    if len(content) > _MAX_TEXT_BYTES:
        raise CheckpointError(f"{path}: larger than {_MAX_TEXT_BYTES} bytes; not a model's file")
    return content


def parse_object(content: bytes, path: pathlib.Path) -> dict[str, Any]:
    """The JSON object in `content`.

    Raises:
        CheckpointError: Not JSON, or not an object; the message names `path`.
    """
    try:
        value = bounded_json.parse(content, max_values=_MAX_VALUES)
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}; download it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def digest(folder: pathlib.Path, *names: str) -> str:
    """SHA-256 of files of the folder together; those that are not there are left out.

    Raises:
        CheckpointError: One leads out of the folder, or cannot be read.
    """
    found = hashlib.sha256()
    for name in names:
        path = member(folder, name)
        if path is not None:
            content = read_bytes(path)
            found.update(f"{name} {len(content)}\n".encode())
            found.update(content)
    return found.hexdigest()


def _homes(folder: pathlib.Path) -> tuple[pathlib.Path, ...]:
    """The folders in which the model's files may really lie."""
    home = folder.resolve(strict=True)
    if home.parent.name == "snapshots":
        return home, home.parent.parent / "blobs"
    return (home,)
