"""Kinds of columns that keys of a job file ask for, by their Arrow types."""

import pyarrow as pa
import pyarrow.types as pt


def is_text(kind: pa.DataType) -> bool:
    """Text in any layout."""
    if pt.is_dictionary(kind):
        return is_text(kind.value_type)
    return pt.is_string(kind) or pt.is_large_string(kind) or pt.is_string_view(kind)


def is_number(kind: pa.DataType) -> bool:
    """Integers and floats."""
    return pt.is_integer(kind) or pt.is_floating(kind)


def is_list(kind: pa.DataType) -> bool:
    """Lists in any layout, of anything."""
    return (
        pt.is_list(kind)
        or pt.is_large_list(kind)
        or pt.is_fixed_size_list(kind)
        or pt.is_list_view(kind)
        or pt.is_large_list_view(kind)
    )


def is_token_ids(kind: pa.DataType) -> bool:
    """Lists of integers."""
    return is_list(kind) and pt.is_integer(kind.value_type)
