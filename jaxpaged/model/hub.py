"""Models of the Hugging Face hub, downloaded into the cache that its own library keeps.

Only files that a model is read from, never pickles or code. What is downloaded is compared with the
digests that the hub names; what is cached under a commit is used without asking the network. Tokens
are the library's own matter (`hf auth login`): none goes through here.
"""

import dataclasses
import fnmatch
import hashlib
import importlib
import logging
import pathlib
import re
import urllib.parse
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from jaxpaged.errors import CheckpointError, ConfigError
from jaxpaged.model.checkpoint import members

SCHEME = "hf://"

_log = logging.getLogger(__name__)

_FORM = "hf://organisation/name@revision, or hf://organisation/name@revision/file.gguf"
_NAME = re.compile(
    r"hf://(?P<repository>\w[\w.-]*/\w[\w.-]*)"
    r"(?:@(?P<revision>refs/(?:pr|convert)/[\w.-]+|\w(?:[\w.+-]|%2F)*))?"
    r"(?:/(?P<file>.+\.gguf))?",
    re.ASCII | re.IGNORECASE,
)
_COMMIT = re.compile(r"[0-9a-f]{40}")

# Files of the model's own folder, not of those below it: configuration, tokenizer, templates.
_TEXTS = ("*.json", "*.jinja", "tokenizer.model", "merges.txt")
_BELOW = "*/*"
_NAMED_TEMPLATES = "additional_chat_templates/*.jinja"

_CONFIG = "config.json"
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_WEIGHTS = re.compile(r"[^/\\]+\.safetensors")  # never pickles, whatever an index says

_CHUNK_BYTES = 4 * 2**20
_SAID_EACH = 0.1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A model's files as they are at one commit.

    Attributes:
        path: The folder, or the `.gguf` file in it.
        name: The model's name with that commit.
    """

    path: pathlib.Path
    name: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What a name asks for."""

    model: str
    repository: str
    revision: str | None
    file: str | None

    @property
    def commit(self) -> str | None:
        """The revision, if it is one that cannot move."""
        return self.revision if _COMMIT.fullmatch(self.revision or "") else None

    def at(self, commit: str) -> str:
        """The name of the model as it is there."""
        return f"{SCHEME}{self.repository}@{commit}" + (f"/{self.file}" if self.file else "")


def fetch(
    model: str,
    *,
    note: Callable[[str], None] | None = None,
    endpoint: str | None = None,
    cache: pathlib.Path | None = None,
) -> Snapshot:
    """The model's files on this machine, downloaded if need be.

    Args:
        model: `hf://organisation/name`, with `@` and a commit, tag or branch (without, the main
            one), with `/` and the path of a `.gguf` file in the repository.
        note: Is told how far a download is; None has the library show it.
        endpoint: The hub's address; None is the library's (`HF_ENDPOINT`).
        cache: Its folder; None is the library's (`HF_HOME`).

    Raises:
        ConfigError: The name is malformed, the library is not installed, or the model is not cached
            and cannot be downloaded.
        CheckpointError: What was downloaded is not what the hub says it is.
    """
    asked = _parse(model)
    found = _Repository(_import_hub(), asked, note, endpoint, cache).snapshot()
    commit = found.name
    if asked.commit is None:
        _log.warning(
            "model: %s names no commit and may be another model tomorrow; it is %s now",
            model,
            asked.at(commit),
        )
    return Snapshot(path=found / asked.file if asked.file else found, name=asked.at(commit))


def _parse(model: str) -> _Asked:
    found = _NAME.fullmatch(model)
    if found is None or ".." in model:
        raise ConfigError(f"model: {model!r} is malformed; expected {_FORM}")
    parts = found.groupdict()
    # The name of a branch may have slashes: %2F here, as the library's own URLs have it.
    revision = parts["revision"] and urllib.parse.unquote(parts["revision"])
    return _Asked(model=model, **parts | {"revision": revision})


def _import_hub() -> ModuleType:
    try:
        return importlib.import_module("huggingface_hub")
    except ImportError:
        raise ConfigError(
            "a model of the Hugging Face hub needs the huggingface-hub package; install it with: "
            "pip install 'jaxpaged[hub]'"
        ) from None


class _Repository:
    """One repository at one revision, as its library reaches it."""

    def __init__(
        self,
        hub: ModuleType,
        asked: _Asked,
        note: Callable[[str], None] | None,
        endpoint: str | None,
        cache: pathlib.Path | None,
    ) -> None:
        self._hub = hub
        self._asked = asked
        self._revision = asked.revision or "main"
        self._note = note
        self._where: dict[str, Any] = {"endpoint": endpoint, "cache_dir": cache}

    def snapshot(self) -> pathlib.Path:
        """The folder with all files that the model is read from; its name is the commit."""
        if self._asked.commit is not None:
            cached = self._cached()
            if cached is not None and self._has_named_templates(cached):
                return cached
        try:
            return self._downloaded()
        except (CheckpointError, self._hub.errors.RevisionNotFoundError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise ConfigError(
                f"model: {self._asked.model!r}: {self._asked.repository} has no revision "
                f"{self._revision}; see its page for branches, tags and commits"
            ) from None
        # The library raises its own errors and those of the HTTP client of the day.
        except Exception as error:
            cached = self._cached()
            if cached is not None:
                _log.warning(
                    "model: %s is taken from the cache, for the hub cannot be reached: %s",
                    self._asked.model,
                    _reason(error),
                )
                return cached
            raise self._explained(error) from None

    def _downloaded(self) -> pathlib.Path:
        # Fails at once, unlike what follows, if there is no such repository.
        api = self._hub.HfApi(endpoint=self._where["endpoint"])
        info = api.repo_info(self._asked.repository, revision=self._revision)
        # By the name of a branch, so that the cache remembers where it was.
        if self._asked.file:
            return self._get([_exactly(self._asked.file)], self._revision)
        names = [file.rfilename for file in info.siblings or ()]
        if _CONFIG not in names:
            raise ConfigError(self._without(_CONFIG, names))
        folder = self._get(_TEXTS, self._revision)
        if templates := fnmatch.filter(names, _NAMED_TEMPLATES):
            self._get([_exactly(name) for name in templates], folder.name)
        # Where there are both, the single file is the model, as it is to whoever opens the folder.
        weights = [_SINGLE] if _SINGLE in names else _weights(folder)
        if _SINGLE in weights and _SINGLE not in names:
            raise ConfigError(self._without(_SINGLE, names))
        # Last, so that a cache with weights has all.
        return self._get([_exactly(name) for name in weights], folder.name)

    def _without(self, missing: str, names: Sequence[str]) -> str:
        """What to say of a repository without that file, by the files that it has."""
        asked = self._asked
        said = f"model: {asked.model!r}: {asked.repository} has no {missing} at {self._revision}"
        if found := fnmatch.filter(names, "*.gguf"):
            one = f"{SCHEME}{asked.repository}@{self._revision}/{found[0]}"
            return f"{said}; a .gguf file of it is named so: {one}"
        if "adapter_config.json" in names:
            return f"{said}: it is an adapter; download it, and give its folder as one of adapters"
        if any(name.endswith((".bin", ".pt", ".pth", ".ckpt")) for name in names):
            return f"{said}, and pickles are not read; save it as safetensors, with transformers"
        return said

    def _get(self, patterns: Sequence[str], revision: str) -> pathlib.Path:
        """The snapshot with the files of those patterns, downloaded where they are not there."""
        silent = _meter(self._hub, str, 0)
        files = self._call(patterns, revision, dry_run=True, tqdm_class=silent)
        if not files:
            raise ConfigError(
                f"model: {self._asked.model!r}: {self._asked.repository} has no "
                f"{' or '.join(patterns)} at {self._revision}"
            )
        wanted = [file for file in files if file.will_download]
        num_bytes = sum(file.file_size or 0 for file in wanted)
        if wanted and self._note is not None:
            self._note(f"downloading {len(wanted)} files, {_size(num_bytes)}: {self._asked.model}")
        meter = None if self._note is None else _meter(self._hub, self._note, num_bytes)
        folder = pathlib.Path(self._call(patterns, revision, tqdm_class=meter))
        for file in wanted:
            _check(folder / file.filename)
        return folder

    def _has_named_templates(self, folder: pathlib.Path) -> bool:
        """Whether those of the commit are there; not, where the cache has no list of its files:
        others may be missing unnoticed then."""
        where = self._where["cache_dir"]
        try:
            listed = self._hub.get_cached_repo_tree(
                self._asked.repository, revision=self._revision, cache_dir=where
            )
        except self._hub.errors.CachedRepoTreeNotFoundError:
            return False
        names = fnmatch.filter([file.path for file in listed], _NAMED_TEMPLATES)
        return bool(self._asked.file) or all((folder / name).is_file() for name in names)

    def _cached(self) -> pathlib.Path | None:
        """The snapshot in the cache, if all of it is there; the network is not asked."""
        patterns = [_exactly(self._asked.file)] if self._asked.file else _TEXTS
        try:
            folder = pathlib.Path(self._call(patterns, self._revision, local_files_only=True))
        except (OSError, ValueError):
            return None
        names = [self._asked.file] if self._asked.file else [_CONFIG, *_weights(folder)]
        return folder if all((folder / name).is_file() for name in names) else None

    def _call(self, patterns: Sequence[str], revision: str, **how: object) -> Any:  # noqa: ANN401
        return self._hub.snapshot_download(
            self._asked.repository,
            revision=revision,
            allow_patterns=list(patterns),
            ignore_patterns=_BELOW if patterns is _TEXTS else None,
            **self._where,
            **how,
        )

    def _explained(self, error: Exception) -> ConfigError:
        errors = self._hub.errors
        if isinstance(error, ConfigError):
            return error
        repository = self._asked.repository
        if isinstance(error, errors.GatedRepoError):
            what = f"access to {repository} is restricted; accept its terms on its page"
            what += ", then: hf auth login"
        elif isinstance(error, errors.RepositoryNotFoundError):
            what = f"there is no model {repository} on the hub, or it is private; check the name"
            what += ", or log in: hf auth login"
        elif _status(error) in (401, 403):
            what = f"access to {repository} is refused; log in: hf auth login ({_reason(error)})"
        elif _status(error) == 429:
            what = f"the hub takes no more requests for now; log in, or wait ({_reason(error)})"
        elif isinstance(error, errors.HFValidationError):
            what = f"{repository} cannot be the name of a repository; expected {_FORM}"
        else:
            what = "it is not in the cache, or not all of it, and cannot be downloaded: "
            what += f"{_reason(error)}; connect to the network (and unset HF_HUB_OFFLINE), or copy "
            what += "the model here and give the path of its folder"
        return ConfigError(f"model: {self._asked.model!r}: {what}")


def _weights(folder: pathlib.Path) -> list[str]:
    """The names of the weight files of a model whose other files are there."""
    if (folder / _SINGLE).is_file():
        return [_SINGLE]
    try:
        index = members.parse_object(members.read_bytes(folder / _INDEX), folder / _INDEX)
        listed = {name for name in index["weight_map"].values() if _WEIGHTS.fullmatch(name)}
        return sorted(listed) or [_SINGLE]
    except (CheckpointError, LookupError, TypeError, AttributeError):
        # A damaged index is told of by whoever opens the folder.
        return [_SINGLE]


def _exactly(name: str) -> str:
    """The pattern that only this name matches."""
    return re.sub(r"([*?\[])", r"[\1]", name)


def _meter(hub: ModuleType, note: Callable[[str], object], num_bytes: int) -> type:
    """A progress bar, to the library, that tells of each tenth of the bytes."""
    done, said = 0, 0.0

    class Meter(hub.utils.tqdm):
        def __init__(self, *args: object, **kwargs: Any) -> None:  # noqa: ANN401
            # Of several bars this one counts bytes as they are written.
            self._counts = kwargs.get("name") == "huggingface_hub.snapshot_download"
            super().__init__(*args, **(kwargs | {"disable": True}))

        def update(self, n: int | float | None = 1) -> None:
            nonlocal done, said
            if self._counts and num_bytes:
                done += int(n or 0)
                if done / num_bytes >= said + _SAID_EACH:
                    said = done / num_bytes
                    note(f"downloaded {_size(done)} of {_size(num_bytes)}")

    return Meter


def _check(path: pathlib.Path) -> None:
    """Compares a file with its digest, which is the name that the cache keeps it under.

    Raises:
        CheckpointError: It differs; it is removed, so that the next attempt downloads it.
    """
    blob = path.resolve()
    if not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", blob.name):
        # A file system without links: the library has compared the size, and that is all.
        return
    # Small files go by Git's digest, large ones by that of their bytes.
    is_git = len(blob.name) == 40
    digest = hashlib.sha1() if is_git else hashlib.sha256()
    if is_git:
        digest.update(f"blob {blob.stat().st_size}\0".encode())
    with blob.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    if digest.hexdigest() != blob.name:
        path.unlink()
        blob.unlink(missing_ok=True)
        raise CheckpointError(
            f"{path}: downloaded bytes are not those that the hub names, and are removed; try again"
        )


def _status(error: Exception) -> int | None:
    """Of the hub's answer, if it gave one."""
    return getattr(getattr(error, "response", None), "status_code", None)


def _reason(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines and lines[0] else type(error).__name__


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
