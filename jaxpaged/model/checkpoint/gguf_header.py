"""The header of a GGUF file: metadata and tensor extents, every size checked before it is used.

Parsed here and not by the `gguf` package's reader, which trusts lengths that the file claims:
one lying array length keeps it busy for ever. Knows nothing of models or of quantisation.
"""

import dataclasses
import math
import mmap
import pathlib
import struct
from collections.abc import Callable, Iterator
from typing import TypeVar

from jaxpaged.errors import CheckpointError
from jaxpaged.model.checkpoint import members
from jaxpaged.model.checkpoint.tensors import is_tensor_name
from jaxpaged.model.shown import shown

_T = TypeVar("_T")

Value = str | int | float | bool | list["Value"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# Vocabularies have 300,000 tokens and 600,000 merges; the largest models 100,000 tensors.
_MAX_HEADER_BYTES = 2**28
_MAX_ITEMS = 2**22
_MAX_VALUES = 2**16
_MAX_TENSORS = 2**17
_MAX_STRING_BYTES = 2**24
_MAX_RANK = 4

_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """What the header says of one tensor.

    Attributes:
        shape: Slowest axis first, as in NumPy.
        ggml_type: The number of its quantisation type.
        offset: Of its bytes in the file.
    """

    shape: tuple[int, ...]
    ggml_type: int
    offset: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """Metadata and tensors of a file.

    Attributes:
        size: Of the file, in bytes.
        metadata: Key to value.
        tensors: Name to what is stored; data extents are not yet checked against the file, since
            they depend on the quantisation types.
    """

    size: int
    metadata: dict[str, Value]
    tensors: dict[str, StoredTensor]


def read_header(path: pathlib.Path) -> GgufHeader:
    """The header of the file.

    Raises:
        CheckpointError: The file cannot be read, is not GGUF, is cut short, or contradicts itself.
    """
    try:
        with path.open("rb") as file:
            if path.stat().st_size < 24:
                raise CheckpointError(f"{path}: not a GGUF file: it is too short to have a header")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                members.check_downloaded(content[:64], path)
                return _parse(content, path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except (struct.error, UnicodeDecodeError):
        raise CheckpointError(
            f"{path}: the GGUF header is damaged or cut short; download the file again"
        ) from None


def _parse(content: mmap.mmap, path: pathlib.Path) -> GgufHeader:
    cursor = _Cursor(content, path)
    magic = cursor.take(4)
    version = cursor.scalar("<I")
    if magic != _MAGIC or version not in _VERSIONS:
        raise CheckpointError(
            f"{path}: not a GGUF file of a supported version (little-endian, version 2 or 3): it "
            f"begins with {magic!r} and version {version}"
        )
    num_tensors, num_values = cursor.scalar("<Q"), cursor.scalar("<Q")
    if num_tensors > _MAX_TENSORS or num_values > _MAX_VALUES:
        raise cursor.damaged(f"{num_tensors} tensors and {num_values} metadata claimed")
    metadata = cursor.table(num_values, lambda: cursor.value(cursor.scalar("<I")))
    tensors = cursor.table(num_tensors, cursor.tensor)
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise cursor.damaged(f"general.alignment is {alignment!r}, expected a power of two")
    start = -(-cursor.position // alignment) * alignment
    for name, tensor in tensors.items():
        if not is_tensor_name(name):
            raise cursor.damaged(f"a tensor is called {shown(name)}")
        if tensor.offset % alignment:
            raise cursor.damaged(f"tensor {name} is not aligned to {alignment} bytes")
    return GgufHeader(
        size=len(content),
        metadata=metadata,
        tensors={
            name: dataclasses.replace(tensor, offset=start + tensor.offset)
            for name, tensor in tensors.items()
        },
    )


class _Cursor:
    """A position in the file that only moves over bytes that are there."""

    def __init__(self, content: mmap.mmap, path: pathlib.Path) -> None:
        self._content = content
        self._path = path
        self._items_left = _MAX_ITEMS
        self.position = 0

    def damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: damaged GGUF file: {what}; download it again")

    def take(self, num_bytes: int) -> bytes:
        begin = self.position
        if num_bytes > len(self._content) - begin:
            raise self.damaged(f"{num_bytes} bytes claimed at {begin} reach beyond its end")
        if begin + num_bytes > _MAX_HEADER_BYTES:
            raise self.damaged(f"its header is longer than {_MAX_HEADER_BYTES} bytes")
        self.position += num_bytes
        return self._content[begin : self.position]

    def scalar(self, layout: str) -> int:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def string(self) -> str:
        length = self.scalar("<Q")
        if length > _MAX_STRING_BYTES:
            raise self.damaged(f"a string of {length} bytes at {self.position}")
        return self.take(length).decode("utf-8")

    def value(self, kind: int) -> Value:
        if kind in _SCALARS:
            layout = _SCALARS[kind]
            return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise self.damaged(f"a value of unknown type {kind} at {self.position}")
        return self._array(self.scalar("<I"), self.scalar("<Q"))

    def _array(self, kind: int, length: int) -> list[Value]:
        if length > self._items_left:
            raise self.damaged(f"an array of {length} items at {self.position}")
        self._items_left -= length
        if kind == _STRING:
            return list(self._strings(length))
        if kind not in _SCALARS:
            raise self.damaged(f"an array of items of type {kind} at {self.position}")
        layout = f"<{length}{_SCALARS[kind][1]}"
        return list(struct.unpack(layout, self.take(struct.calcsize(layout))))

    def _strings(self, length: int) -> Iterator[str]:
        """As many calls of `string`, in one loop: a vocabulary has hundreds of thousands."""
        content, limit = self._content, min(len(self._content), _MAX_HEADER_BYTES)
        for _ in range(length):
            begin = self.position + 8
            end = begin + int.from_bytes(content[self.position : begin], "little")
            if end > limit:
                raise self.damaged(f"a string at {self.position} reaches beyond its end")
            self.position = end
            yield content[begin:end].decode("utf-8")

    def tensor(self) -> StoredTensor:
        rank = self.scalar("<I")
        if rank > _MAX_RANK:
            raise self.damaged(f"a tensor with {rank} axes at {self.position}")
        fastest_first = [self.scalar("<Q") for _ in range(rank)]
        if math.prod(fastest_first) >= 2**63:
            raise self.damaged(f"a tensor of shape {fastest_first} at {self.position}")
        return StoredTensor(
            shape=tuple(reversed(fastest_first)),
            ggml_type=self.scalar("<I"),
            offset=self.scalar("<Q"),
        )

    def table(self, length: int, read: Callable[[], _T]) -> dict[str, _T]:
        entries: dict[str, _T] = {}
        for _ in range(length):
            name = self.string()
            if name in entries:
                raise self.damaged(f"{shown(name)} occurs twice")
            entries[name] = read()
        return entries
