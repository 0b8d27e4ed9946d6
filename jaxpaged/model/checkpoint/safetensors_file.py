"""One safetensors file: its header, checked before any data is read, and its tensors.

Knows nothing of models. The file is untrusted: sizes and offsets may lie.
"""

import dataclasses
import itertools
import json
import math
import pathlib
from typing import Any, TypeGuard

import ml_dtypes
import numpy as np
import safetensors

from jaxpaged.errors import CheckpointError

# The format's own limit.
_MAX_HEADER_BYTES = 100_000_000

_MAX_RANK = 8

_DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """What the header says of one tensor.

    Attributes:
        shape: The tensor's shape.
        dtype: Its NumPy dtype.
        begin: Of its bytes, counted from the end of the header.
        end: Behind its bytes.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    begin: int
    end: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsFile:
    """A file whose header has been read and checked.

    Attributes:
        path: The file.
        size: Of the file, in bytes.
        header: The header's bytes, for hashing.
        entries: Name to entry of every tensor.
    """

    path: pathlib.Path
    size: int
    header: bytes
    entries: dict[str, TensorEntry]

    def tensor(self, name: str) -> np.ndarray:
        """The named tensor in its stored dtype, copied out of the file.

        Raises:
            CheckpointError: The data cannot be read.
        """
        try:
            with safetensors.safe_open(self.path, framework="numpy") as file:
                return file.get_tensor(name)
        except (OSError, safetensors.SafetensorError) as error:
            raise CheckpointError(f"{self.path}: cannot read tensor {name}: {error}") from None


def open_safetensors(path: pathlib.Path) -> SafetensorsFile:
    """The file with its header read and checked against the file's size.

    Raises:
        CheckpointError: The file cannot be read, is cut short, or its header is not that of a
            safetensors file with float tensors; the message names the tensor.
    """
    size, header = _read_header(path)
    listed = _parse(header, path)
    entries = {
        name: _entry(name, value, path) for name, value in listed.items() if name != "__metadata__"
    }
    _check_extents(entries, size - 8 - len(header), path)
    return SafetensorsFile(path=path, size=size, header=header, entries=entries)


def _read_header(path: pathlib.Path) -> tuple[int, bytes]:
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
                raise CheckpointError(
                    f"{path}: not a safetensors file, or cut short: it claims a header of {length} "
                    f"bytes in a file of {size} bytes; download it again"
                )
            return size, file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None


def _parse(header: bytes, path: pathlib.Path) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs):
            raise ValueError("a name occurs twice")
        return values

    try:
        listed = json.loads(header, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: not a safetensors file: its header is not JSON ({error})"
        ) from None
    if not isinstance(listed, dict):
        raise CheckpointError(f"{path}: not a safetensors file: its header is not a JSON object")
    return listed


def _entry(name: str, value: object, path: pathlib.Path) -> TensorEntry:
    fields: dict[str, Any] = value if isinstance(value, dict) else {}
    dtype = _DTYPES.get(str(fields.get("dtype")))
    shape = fields.get("shape")
    extent = fields.get("data_offsets")
    if dtype is None:
        raise CheckpointError(
            f"{path}: tensor {name} has dtype {fields.get('dtype')!r}; supported are "
            + ", ".join(_DTYPES)
        )
    if not _is_counts(shape) or len(shape) > _MAX_RANK:
        raise CheckpointError(f"{path}: tensor {name} has the malformed shape {shape!r}")
    if not _is_counts(extent) or len(extent) != 2:
        raise CheckpointError(f"{path}: tensor {name} has the malformed offsets {extent!r}")
    if extent[1] - extent[0] != math.prod(shape) * dtype.itemsize:
        raise CheckpointError(
            f"{path}: tensor {name} of shape {shape} and dtype {fields['dtype']} needs "
            f"{math.prod(shape) * dtype.itemsize} bytes, but its offsets span "
            f"{extent[1] - extent[0]}"
        )
    return TensorEntry(shape=tuple(shape), dtype=dtype, begin=extent[0], end=extent[1])


def _is_counts(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_extents(entries: dict[str, TensorEntry], data_bytes: int, path: pathlib.Path) -> None:
    ordered = sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end))
    for name, entry in ordered:
        if entry.end > data_bytes:
            raise CheckpointError(
                f"{path}: tensor {name} ends at byte {entry.end} of the data, but there are only "
                f"{data_bytes}; the file is cut short: download it again"
            )
    for (name, entry), (next_name, next_entry) in itertools.pairwise(ordered):
        if next_entry.begin < entry.end:
            raise CheckpointError(f"{path}: tensors {name} and {next_name} overlap")
