"""One safetensors file: its header, checked before any data is read, and its tensors.

Knows nothing of models. The file is untrusted: sizes and offsets may lie. Read here and not by the
`safetensors` package, which has no 8-bit floats for NumPy and parses the header for every tensor.
"""

import dataclasses
import math
import pathlib
from typing import Any, TypeGuard

import ml_dtypes
import numpy as np

from jaxpaged.errors import CheckpointError
from jaxpaged.model.checkpoint import bounded_json, members
from jaxpaged.model.checkpoint.tensors import Shape, is_tensor_name
from jaxpaged.model.shown import shown

# One file with all experts of the largest models there are has half as many.
_MAX_TENSORS = 2**17
_MAX_HEADER_BYTES = 256 * _MAX_TENSORS
_MAX_VALUES = 16 * _MAX_TENSORS

_MAX_RANK = 8
_MAX_SIZE = 2**63

_DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    # Words that quantised weights are packed into.
    "I32": np.dtype(np.int32),
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

    shape: Shape
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
        entry = self.entries[name]
        start = 8 + len(self.header) + entry.begin
        try:
            data = np.fromfile(self.path, np.uint8, entry.end - entry.begin, offset=start)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot read tensor {name}: {error}") from None
        if data.size != entry.end - entry.begin:
            raise CheckpointError(
                f"{self.path}: cannot read tensor {name}: the file has become shorter"
            )
        return data.view(entry.dtype).reshape(entry.shape)


def open_safetensors(path: pathlib.Path) -> SafetensorsFile:
    """The file with its header read and checked against the file's size.

    Raises:
        CheckpointError: The file cannot be read, is cut short, or its header is not that of a
            safetensors file with floats or packed weights; the message names the tensor.
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
            beginning = file.read(64)
            members.check_downloaded(beginning, path)
            length = int.from_bytes(beginning[:8], "little")
            if size < 8 or not 2 <= length <= size - 8:
                raise CheckpointError(
                    f"{path}: not a safetensors file, or cut short: it claims a header of {length} "
                    f"bytes in a file of {size} bytes; download it again"
                )
            if length > _MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{path}: claims a header of {length} bytes; expected at most "
                    f"{_MAX_HEADER_BYTES}: the file is damaged, or not a model's"
                )
            file.seek(8)
            return size, file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None


def _parse(header: bytes, path: pathlib.Path) -> dict[str, Any]:
    try:
        listed = bounded_json.parse(header, max_values=_MAX_VALUES, unique=True)
    except ValueError as error:
        raise CheckpointError(
            f"{path}: not a safetensors file: its header is not JSON that can be read ({error})"
        ) from None
    if not isinstance(listed, dict):
        raise CheckpointError(f"{path}: not a safetensors file: its header is not a JSON object")
    if len(listed) > _MAX_TENSORS:
        raise CheckpointError(
            f"{path}: lists {len(listed)} tensors; expected at most {_MAX_TENSORS}"
        )
    return listed


def _entry(name: str, value: object, path: pathlib.Path) -> TensorEntry:
    if not is_tensor_name(name):
        raise CheckpointError(f"{path}: {shown(name)} is not the name of a tensor")
    fields: dict[str, Any] = value if isinstance(value, dict) else {}
    named = fields.get("dtype")
    dtype = _DTYPES.get(named) if isinstance(named, str) else None
    shape = fields.get("shape")
    extent = fields.get("data_offsets")
    if dtype is None:
        raise CheckpointError(
            f"{path}: tensor {name} has dtype {shown(named)}; supported are "
            f"{', '.join(_DTYPES)}; save the model in one of them"
        )
    if not _is_sizes(shape) or len(shape) > _MAX_RANK:
        raise CheckpointError(f"{path}: tensor {name} has the malformed shape {shown(shape)}")
    if not _is_sizes(extent) or len(extent) != 2:
        raise CheckpointError(f"{path}: tensor {name} has the malformed offsets {shown(extent)}")
    if extent[1] - extent[0] != math.prod(shape) * dtype.itemsize:
        raise CheckpointError(
            f"{path}: tensor {name} of shape {shape} and dtype {named} needs "
            f"{math.prod(shape) * dtype.itemsize} bytes, but its offsets span "
            f"{extent[1] - extent[0]}"
        )
    return TensorEntry(shape=tuple(shape), dtype=dtype, begin=extent[0], end=extent[1])


def _is_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        type(item) is int and 0 <= item < _MAX_SIZE for item in value
    )


def _check_extents(entries: dict[str, TensorEntry], data_bytes: int, path: pathlib.Path) -> None:
    """Every byte behind the header belongs to one tensor, as the format asks."""
    end, last = 0, ""
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.end > data_bytes:
            raise CheckpointError(
                f"{path}: tensor {name} ends at byte {entry.end} of the data, but there are only "
                f"{data_bytes}; the file is cut short: download it again"
            )
        if entry.begin < end:
            raise CheckpointError(f"{path}: tensors {last} and {name} overlap")
        if entry.begin > end:
            raise CheckpointError(
                f"{path}: {entry.begin - end} bytes before tensor {name} belong to no tensor; "
                "download the file again"
            )
        end, last = entry.end, name
    if end != data_bytes:
        raise CheckpointError(
            f"{path}: {data_bytes - end} bytes behind the last tensor belong to no tensor; "
            "download the file again"
        )
