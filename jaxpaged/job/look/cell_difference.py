"""Which cells of two columns differ: by value, floating-point numbers bit for bit.

NaN is like any other NaN; 0.0 and -0.0 differ. Knows nothing of files and rows.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

Mask = npt.NDArray[np.bool_]

_LISTS = (
    *(pa.ListArray, pa.LargeListArray, pa.FixedSizeListArray),
    *(pa.ListViewArray, pa.LargeListViewArray),
)


def common_type(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    """The type in which cells of both types can be compared; None if there is none."""
    if a == b:
        return a
    if _is_bytes(a) or _is_bytes(b):
        # Text may be taken as bytes, but not all bytes are text.
        is_comparable = all(_is_bytes(kind) or _is_text(kind) for kind in (a, b))
        return pa.large_binary() if is_comparable else None
    schemas = [pa.schema([("cell", kind)]) for kind in (a, b)]
    try:
        kind = pa.unify_schemas(schemas, promote_options="permissive").field(0).type
        for source in (a, b):
            pa.nulls(0, source).cast(kind)
    except pa.ArrowException:
        return None
    return kind


def differ(a: pa.Array, b: pa.Array) -> Mask:
    """Which cells differ, of columns of the same length.

    Cells of different types are compared in their common type; one that does not fit into it
    differs from all others, and so do all cells where there is no such type.
    """
    kind = common_type(a.type, b.type)
    if kind is None:
        return np.ones(len(a), np.bool_)
    (a, misfits_a), (b, misfits_b) = _cast(a, kind), _cast(b, kind)
    return _differ(a, b) | misfits_a | misfits_b


def _cast(array: pa.Array, kind: pa.DataType) -> tuple[pa.Array, Mask]:
    """The cells in another type, and which of them do not fit."""
    misfits = np.zeros(len(array), np.bool_)
    if array.type == kind:
        return array, misfits
    try:
        return array.cast(kind), misfits
    except pa.ArrowInvalid:
        cells = [_cast_cell(array.slice(i, 1), kind) for i in range(len(array))]
    misfits[:] = [cell is None for cell in cells]
    null = pa.nulls(1, kind)
    return pa.concat_arrays([null if cell is None else cell for cell in cells]), misfits


def _cast_cell(cell: pa.Array, kind: pa.DataType) -> pa.Array | None:
    try:
        return cell.cast(kind)
    except pa.ArrowInvalid:
        return None


def _differ(a: pa.Array, b: pa.Array) -> Mask:
    """The same for one type."""
    valid_a, valid_b = _valid(a), _valid(b)
    both = valid_a & valid_b
    found = valid_a != valid_b
    if both.any():
        found[both] = _differ_valid(a.filter(pa.array(both)), b.filter(pa.array(both)))
    return found


def _differ_valid(a: pa.Array, b: pa.Array) -> Mask:
    """The same without nulls."""
    kind = a.type
    if pt.is_dictionary(kind):
        return _differ(a.dictionary_decode(), b.dictionary_decode())
    if pt.is_float32(kind) or pt.is_float64(kind):
        return _differ_floats(a.to_numpy(), b.to_numpy())
    if pt.is_struct(kind):
        pairs = zip(a.flatten(), b.flatten(), strict=True)
        return np.logical_or.reduce([_differ(*pair) for pair in pairs] or [_none(a)])
    if pt.is_map(kind):
        return _differ_lists(_entries(a), _entries(b))
    if isinstance(a, _LISTS):
        return _differ_lists(a, b)
    try:
        return _numpy(pc.call_function("not_equal", [a, b]))
    except pa.ArrowNotImplementedError:
        pairs = zip(a.to_pylist(), b.to_pylist(), strict=True)
        return np.array([not _is_same(*pair) for pair in pairs], np.bool_)


def _differ_floats(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> Mask:
    bits = np.int32 if a.dtype == np.float32 else np.int64
    return (a.view(bits) != b.view(bits)) & ~(np.isnan(a) & np.isnan(b))


def _differ_lists(a: pa.Array, b: pa.Array) -> Mask:
    lengths = _numpy(pc.call_function("list_value_length", [a]))
    found = lengths != _numpy(pc.call_function("list_value_length", [b]))
    alike = ~found
    items = _differ(a.filter(pa.array(alike)).flatten(), b.filter(pa.array(alike)).flatten())
    # How many items differ up to each list's end; a list differs if that grows within it.
    ends = np.cumsum(lengths[alike], dtype=np.int64)
    counts = np.concatenate([[0], np.cumsum(items)])
    found[alike] = counts[ends] > counts[ends - lengths[alike]]
    return found


def _entries(array: pa.MapArray) -> pa.ListArray:
    """Maps as lists of their entries."""
    entries = pa.StructArray.from_arrays([array.keys, array.items], names=["key", "value"])
    return pa.ListArray.from_arrays(array.offsets, entries)


def _is_same(a: object, b: object) -> bool:
    """Whether two values of Python's are the same, for types that Arrow does not compare."""
    if isinstance(a, float) and isinstance(b, float):
        if math.isnan(a) or math.isnan(b):
            return math.isnan(a) and math.isnan(b)
        return a == b and math.copysign(1, a) == math.copysign(1, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_is_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_is_same, a, b))
    return a == b


def _is_bytes(kind: pa.DataType) -> bool:
    return pt.is_binary(kind) or pt.is_large_binary(kind) or pt.is_fixed_size_binary(kind)


def _is_text(kind: pa.DataType) -> bool:
    return pt.is_string(kind) or pt.is_large_string(kind)


def _valid(array: pa.Array) -> Mask:
    return _numpy(array.is_valid())


def _none(array: pa.Array) -> Mask:
    return np.zeros(len(array), np.bool_)


def _numpy(array: pa.Array) -> npt.NDArray[Any]:
    return array.to_numpy(zero_copy_only=False)
