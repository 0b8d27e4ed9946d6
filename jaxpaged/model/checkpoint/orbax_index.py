"""The index of a converted checkpoint: what its folder holds, as one JSON file that marks it.

Looked at without Orbax and without JAX. The folder is untrusted: the index may lie.
"""

import dataclasses
import functools
import hashlib
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, Literal, NoReturn

import ml_dtypes
import numpy as np
import pydantic

from jaxpaged.errors import CheckpointError
from jaxpaged.model.checkpoint import members
from jaxpaged.model.config import ModelConfig

MARKER = "jaxpaged-checkpoint.json"

WEIGHTS = "weights"

_FORMAT = "jaxpaged-orbax"
_VERSION = 1

# A file may lie; a name per layer and expert is made before any array is looked for.
_MAX_LAYERS = 4096
_MAX_EXPERTS = 2**17
_MAX_RANK = 8
_MAX_PIECES = 2**16

# Reading leaves some seven pieces' memory to the allocator; smaller ones cost time for each.
_PIECE_BYTES = 8 * 2**20

DTypeName = Literal["bfloat16", "float16", "float32"]

_DTYPES: dict[DTypeName, np.dtype] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredArray:
    """One array, as the decoder has it, cut along its first axis.

    Attributes:
        shape: The layers first where there are several; linear maps are `[in, out]`.
        dtype: Name of its dtype.
        rows: How much of the first axis is in a piece; the last piece may have less.
        sha256: Of its values, as they were written.
    """

    shape: tuple[int, ...]
    dtype: DTypeName
    rows: int
    sha256: str

    @classmethod
    def of(cls, values: np.ndarray) -> "StoredArray":
        """What is to know of an array."""
        names: dict[np.dtype, DTypeName] = {dtype: name for name, dtype in _DTYPES.items()}
        digest = hashlib.sha256(values.reshape(-1).view(np.uint8).data)
        rows = max(1, _PIECE_BYTES // max(1, values[:1].nbytes))
        return cls(
            shape=values.shape,
            dtype=names[values.dtype],
            rows=min(rows, values.shape[0]),
            sha256=digest.hexdigest(),
        )

    @property
    def pieces(self) -> list[slice]:
        """What of the first axis is in each piece."""
        count = self.shape[0]
        return [slice(n, min(n + self.rows, count)) for n in range(0, count, self.rows)]

    def piece_shape(self, piece: slice) -> tuple[int, ...]:
        """The shape of a piece."""
        return (piece.stop - piece.start, *self.shape[1:])

    @property
    def numpy_dtype(self) -> np.dtype:
        """Its dtype."""
        return _DTYPES[self.dtype]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OrbaxIndex:
    """What is in the folder.

    Attributes:
        config: The model's configuration.
        config_json: SHA-256 of the source's config.json, which lies beside and is not read.
        arrays: Name to array.
        files: Path below `weights` to size, of every file there.
        source: What the weights were made from: name, format, fingerprint, SHA-256 of files.
        versions: Of what wrote the folder.
        created: When.
    """

    config: ModelConfig
    config_json: str
    arrays: dict[str, StoredArray]
    files: dict[str, int]
    source: dict[str, Any]
    versions: dict[str, str]
    created: str

    def fingerprint(self) -> dict[str, str]:
        """SHA-256 of the configuration, and of what the weights are."""
        arrays = {name: dataclasses.asdict(array) for name, array in self.arrays.items()}
        return {"config": _digest(dataclasses.asdict(self.config)), "weights": _digest(arrays)}

    def to_bytes(self) -> bytes:
        """The content of the file."""
        value = {"format": _FORMAT, "version": _VERSION, **dataclasses.asdict(self)}
        return json.dumps(value, indent=1, allow_nan=False).encode()


def piece_name(array: str, number: int) -> str:
    """The folder of a piece, below `weights`."""
    return f"{array}.{number:03}"


def read_index(folder: pathlib.Path) -> OrbaxIndex:
    """The folder's index, checked in itself and against the files that there are.

    Raises:
        CheckpointError: It is damaged, of another version, or not what the folder holds.
    """
    path = members.member(folder, MARKER)
    if path is None:
        raise CheckpointError(f"{folder / MARKER} is not a file")
    content = members.parse_object(members.read_bytes(path), path)
    version = content.pop("version", None)
    if content.pop("format", None) != _FORMAT or type(version) is not int:
        raise CheckpointError(f"{path}: not the index of a checkpoint that jaxpaged convert wrote")
    if version != _VERSION:
        raise CheckpointError(
            f"{path}: its layout is of version {version}, this jaxpaged reads version {_VERSION}; "
            "use the jaxpaged that wrote it, or convert the model again"
        )
    _check_layers(content.get("config"), path)
    try:
        index = _reader()(json.dumps(content), strict=True)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise _damaged(path, f"{place}: {first['msg']}") from None
    except ValueError as error:
        raise _damaged(path, str(error)) from None
    _check_config(index.config, content["config"], path)
    _check_arrays(index.arrays, path)
    _check_files(folder, index.files, path)
    if members.digest(folder, "config.json") != index.config_json:
        raise CheckpointError(
            f"{folder / 'config.json'} is not the one that came with the model, and would have no "
            "effect here; change it in the source and convert that again"
        )
    return index


@functools.cache
def _reader() -> Callable[..., OrbaxIndex]:
    return pydantic.TypeAdapter(OrbaxIndex).validate_json


def _damaged(path: pathlib.Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path}: damaged: {what}; convert the model again")


def _check_layers(config: object, path: pathlib.Path) -> None:
    """Before the configuration is made, which has values for each layer."""
    layers = config.get("num_layers") if isinstance(config, Mapping) else None
    if type(layers) is not int or not 1 <= layers <= _MAX_LAYERS:
        raise _damaged(path, f"config.num_layers is {layers!r}; expected 1 to {_MAX_LAYERS}")


def _check_config(config: ModelConfig, written: Mapping[str, Any], path: pathlib.Path) -> None:
    def fail(what: str) -> NoReturn:
        raise _damaged(path, f"config.{what}")

    # Through JSON, for lists stand for tuples there.
    read = json.loads(json.dumps(dataclasses.asdict(config)))
    different = sorted(key for key in written if written[key] != read.get(key, ...))
    if different:
        fail(f"{different[0]}: not known to this version of jaxpaged")
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads")
    for name in (*sizes, "num_kv_heads", "head_dim", "max_position_embeddings"):
        if not 1 <= getattr(config, name) < 2**31:
            fail(f"{name} is {getattr(config, name)}")
    count = 1 if config.experts is None else config.experts.count
    if not 1 <= count * config.num_layers <= _MAX_EXPERTS:
        fail(f"experts.count is {count}")
    if config.num_heads % config.num_kv_heads or config.head_dim % 2:
        fail("num_kv_heads must divide num_heads, and head_dim be even")


def _check_arrays(arrays: Mapping[str, StoredArray], path: pathlib.Path) -> None:
    for name, array in arrays.items():
        if not name or "/" in name or "\\" in name or name.startswith("."):
            raise _damaged(path, f"{name!r} is not the name of an array")
        is_shape = all(0 < size < 2**40 for size in array.shape)
        if not is_shape or not 1 <= len(array.shape) <= _MAX_RANK:
            raise _damaged(path, f"array {name} has the shape {list(array.shape)}")
        if not 1 <= array.rows <= array.shape[0] <= array.rows * _MAX_PIECES:
            raise _damaged(path, f"array {name} is in pieces of {array.rows} rows")


def _check_files(folder: pathlib.Path, files: Mapping[str, int], index: pathlib.Path) -> None:
    """Every file is there, inside the folder, and as long as it was; and no other is."""
    home = folder.resolve()
    there = (folder / WEIGHTS).rglob("*")
    more = {path.relative_to(folder / WEIGHTS).as_posix() for path in there if not path.is_dir()}
    if more - files.keys():
        raise CheckpointError(
            f"{folder / WEIGHTS / min(more - files.keys())} is not a file that was written with "
            "the others; remove it"
        )
    for name, size in files.items():
        path = folder / WEIGHTS / name
        if pathlib.PurePosixPath(name).is_absolute() or ".." in pathlib.PurePosixPath(name).parts:
            raise _damaged(index, f"{name!r} is not a file below {WEIGHTS}")
        try:
            target = path.resolve(strict=True)
            found = target.stat().st_size
        except (OSError, RuntimeError, ValueError) as error:
            raise CheckpointError(
                f"{path}: cannot be read: {error}; copy the whole folder, or convert the model "
                "again"
            ) from None
        if not target.is_relative_to(home):
            raise CheckpointError(
                f"{path} is a link to {target}, outside the model folder; copy the file into it"
            )
        if found != size:
            raise CheckpointError(
                f"{path} has {found} bytes, written were {size}; it is cut short or was changed: "
                "copy the folder again, or convert the model again"
            )


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
