"""Columns as they are stored made into plain arrays, and cells that are not text found.

Knows nothing of files.
"""

from collections.abc import Sequence

import pyarrow as pa


def plain(batch: pa.RecordBatch, columns: Sequence[str]) -> pa.RecordBatch:
    """The batch with its columns in the asked order, as plain arrays.

    Dictionaries are decoded: a batch that is kept would otherwise keep the whole dictionary.
    """
    arrays = []
    for name in columns:
        array = batch.column(name)
        if isinstance(array, pa.ExtensionArray):
            array = array.storage
        if pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        # Arrow has few functions for views.
        if pa.types.is_string_view(array.type):
            array = array.cast(pa.large_string())
        if pa.types.is_binary_view(array.type):
            array = array.cast(pa.large_binary())
        arrays.append(array)
    # A batch without columns still has its rows.
    return pa.RecordBatch.from_arrays(arrays, names=list(columns)) if arrays else batch.select([])


def without_invalid(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, dict[int, str]]:
    """The batch with cells that are not valid UTF-8 made null, and where they were."""
    arrays: list[pa.Array] = []
    invalid: dict[int, str] = {}
    for name, array in zip(batch.schema.names, batch.columns, strict=True):
        if not _is_valid(array):
            # Joined with a null each cell is a copy of its own: Arrow checks all that a slice of
            # a list shares. Joining also works for views inside lists and structs.
            null = pa.nulls(1, array.type)
            cells = [pa.concat_arrays([array.slice(i, 1), null])[:1] for i in range(len(array))]
            bad = {i for i, cell in enumerate(cells) if not _is_valid(cell)}
            invalid.update((i, name) for i in bad)
            array = pa.concat_arrays([null if i in bad else c for i, c in enumerate(cells)])
        arrays.append(array)
    if not invalid:
        return batch, invalid
    return pa.RecordBatch.from_arrays(arrays, names=batch.schema.names), invalid


def _is_valid(array: pa.Array) -> bool:
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True
