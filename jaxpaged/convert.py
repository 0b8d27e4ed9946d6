"""A model of any format as one checkpoint in Orbax's format, written whole or not at all.

Arrays are made and written one at a time, so converting takes the memory of a few of them.
"""

import contextlib
import dataclasses
import datetime
import errno
import glob
import hashlib
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator

import numpy as np

from jaxpaged.errors import CheckpointError, OutputConflictError, StorageError
from jaxpaged.job import versions
from jaxpaged.model import source
from jaxpaged.model.checkpoint import (
    Checkpoint,
    folder_tokenizer,
    members,
    open_checkpoint,
    orbax_arrays,
    tokenizer_files,
)
from jaxpaged.model.checkpoint.orbax_index import (
    MARKER,
    WEIGHTS,
    DTypeName,
    OrbaxIndex,
    StoredArray,
    piece_name,
)
from jaxpaged.storage.disk import Disk

# What beside the weights is read of a model in Hugging Face layout; a folder may hold much else.
_TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.json",
    "chat_template.jinja",
)

_ENDING = ".unfinished"

_CHUNK_BYTES = 4 * 2**20


def convert(
    model: str,
    target: pathlib.Path,
    *,
    dtype: DTypeName | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> pathlib.Path:
    """Writes the checkpoint of a model; returns its folder.

    Args:
        model: As in a job file.
        target: The folder; must not exist, or be empty. Appears when all of it is written.
        dtype: Of the weights; None for the one they are stored in, bfloat16 for quantised ones.
        note: Is told how far it is.

    Raises:
        ConfigError: There is no such model, or what its format needs is not installed.
        CheckpointError: The model's files are missing, damaged or not of a supported model.
        OutputConflictError: `target` holds something.
        StorageError: It cannot be written.
    """
    # Where links lead: the folder is renamed to it.
    target = pathlib.Path(os.path.realpath(target))
    _check_free(target)
    found = source.resolve(model, note=note)
    checkpoint = open_checkpoint(found.path)
    tokenizer = checkpoint.tokenizer()
    with _folder(target, note) as folder:
        _write_texts(checkpoint, folder)
        provenance = _provenance(checkpoint, found.name, note)
        index = OrbaxIndex(
            # The arrays are cut as the decoder has them, whatever the source's tensors were.
            config=dataclasses.replace(checkpoint.config, tensor_layout="llama"),
            config_json=members.digest(folder, "config.json"),
            arrays=_write_arrays(checkpoint, folder / WEIGHTS, dtype, note),
            files=_sizes(folder / WEIGHTS),
            source=provenance,
            versions=versions.installed(),
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )
        (folder / MARKER).write_bytes(index.to_bytes())
        different = tokenizer_files.differences(tokenizer, open_checkpoint(folder).tokenizer())
        if different:
            raise CheckpointError(
                f"{checkpoint.path}: this tokenizer cannot be written as tokenizer.json without a "
                f"change of its {', '.join(different)}; please report it"
            )
    return target


def _check_free(target: pathlib.Path) -> None:
    try:
        if target.is_dir() and not any(target.iterdir()):
            return
        if not target.exists() and not target.is_symlink():
            return
    except OSError as error:
        raise StorageError(f"{target}: cannot be looked at: {error.strerror}") from None
    raise OutputConflictError(
        f"{target} is there already, and nothing is overwritten; remove it, or give another folder"
    )


@contextlib.contextmanager
def _folder(target: pathlib.Path, note: Callable[[str], None]) -> Iterator[pathlib.Path]:
    """A folder beside the target that takes its name at the end, or is removed."""
    disk = Disk()
    folder = target.with_name(f".{target.name}.{os.getpid()}{_ENDING}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for left in target.parent.glob(f".{glob.escape(target.name)}.*{_ENDING}"):
            note(f"{left} is of a conversion that was killed, or that runs; it may be removed then")
        folder.mkdir()
        yield folder
        for path in sorted(folder.rglob("*"), reverse=True):
            disk.sync(path)
        disk.rename(folder, target)
        disk.sync(target.parent)
    except OSError as error:
        if error.errno == errno.ENOTEMPTY:
            _check_free(target)
        raise StorageError(
            f"{target}: cannot be written: {error.strerror or error}; nothing is left of it"
        ) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write_texts(checkpoint: Checkpoint, folder: pathlib.Path) -> None:
    """What beside the weights belongs to the model; as it is, where it is files."""
    if not checkpoint.path.is_dir():
        for name, content in tokenizer_files.contents(checkpoint.tokenizer()).items():
            (folder / name).write_bytes(content)
        return
    for name in _TEXT_FILES:
        found = members.member(checkpoint.path, name)
        if found is not None:
            (folder / name).write_bytes(members.read_bytes(found))
    for path in folder_tokenizer.template_files(checkpoint.path).values():
        if path.parent != checkpoint.path:
            (folder / path.parent.name).mkdir(exist_ok=True)
            (folder / path.parent.name / path.name).write_bytes(members.read_bytes(path))


def _write_arrays(
    checkpoint: Checkpoint,
    folder: pathlib.Path,
    dtype: DTypeName | None,
    note: Callable[[str], None],
) -> dict[str, StoredArray]:
    # Here, for it loads JAX: what is wrong with the model's other files is told before.
    from jaxpaged.model import weights

    folder.mkdir()
    arrays: dict[str, StoredArray] = {}
    written = 0
    for name, values in weights.stacks(checkpoint, dtype and np.dtype(dtype)):
        free = shutil.disk_usage(folder).free
        if values.nbytes > free:
            raise StorageError(
                f"{folder}: no space left: {name} takes {_size(values.nbytes)}, free are "
                f"{_size(free)}; nothing is left of it"
            )
        arrays[name] = StoredArray.of(values)
        for number, part in enumerate(arrays[name].pieces):
            orbax_arrays.save(folder / piece_name(name, number), values[part])
        written += values.nbytes
        note(f"written {name}, {values.dtype.name}{list(values.shape)}: {_size(written)}")
    return arrays


def _provenance(
    checkpoint: Checkpoint, name: str, note: Callable[[str], None]
) -> dict[str, object]:
    """What there is to know of the source."""
    digests = {}
    for path in checkpoint.weight_files():
        note(f"reading {path.name} for its SHA-256")
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
        digests[path.name] = digest.hexdigest()
    return {
        "model": name,
        "format": _format(checkpoint.path),
        "fingerprint": checkpoint.fingerprint(),
        "weight_files": digests,
    }


def _format(path: pathlib.Path) -> str:
    if (path / MARKER).exists():
        return "orbax"
    return "safetensors" if path.is_dir() else "gguf"


def _sizes(folder: pathlib.Path) -> dict[str, int]:
    """Path below the folder to size, of every file."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
