"""Linear maps of the live rows of a step; see `pallas_kernels.linear_map`.

A panel of the weights goes by while the rows stay in a core's cache. The output head is turned
around: the rows of its table are many and lie as they are wanted for the other side of a product.
"""

from typing import no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.llvm import ffi
from pallas_kernels.llvm.compiler import compiled
from pallas_kernels.llvm.ffi import dim, integer, operand, result
from pallas_kernels.llvm.instructions import floats
from pallas_kernels.llvm.tiles import panel_product, strip_product
from pallas_kernels.llvm.vectors import LANES, PANEL

AnyArray = Array | np.ndarray

ROWS = 96
"""Rows of an item of work, and rows of the head's table."""
TILE = ROWS * PANEL
"""Numbers of an item's result."""
INNER = 768
"""Rows of a panel that are taken at once: they and the rows' numbers stay in a core's cache."""

_X, _PANELS, _LAYER, _NUM_ROWS, _ADDED = range(5)
_COLUMNS, _TABLE, _NUM_COLUMNS = range(3)


def linear(
    x: Float[Array, "T I"],
    panels: Float[Array, "L P I C"],
    *,
    layer: Int[AnyArray, ""],
    num_rows: Int[AnyArray, ""],
    width: int,
    added: Float[Array, "T O"] | None = None,
) -> Float[Array, "T O"]:
    """See `pallas_kernels.linear_map.linear`."""
    result = jax.ShapeDtypeStruct((x.shape[0], width), jnp.float32)
    place = (jnp.asarray(layer, jnp.int32), jnp.asarray(num_rows, jnp.int32))
    operands = (x, panels, *place) if added is None else (x, panels, *place, added)
    return ffi.ffi_call("jaxpaged.linear", result, *operands, scratch=TILE)


def head(
    x: Float[Array, "R M"], table: Float[Array, "V M"], *, num_rows: Int[AnyArray, ""]
) -> Float[Array, "R V"]:
    """See `pallas_kernels.linear_map.head`."""
    columns = jnp.pad(x, ((0, -x.shape[0] % PANEL), (0, 0))).T
    result = jax.ShapeDtypeStruct((x.shape[0], table.shape[0]), jnp.float32)
    count = jnp.asarray(num_rows, jnp.int32)
    return ffi.ffi_call("jaxpaged.head", result, columns, table, count, scratch=TILE)


@compiled
@no_type_check
def clear(address, rows, stride, first, last):
    """Zeros in `last - first` numbers of each row."""
    numbers = floats(address)
    for row in range(rows):
        for index in range(row * stride + first, row * stride + last):
            numbers[index] = 0.0


@no_type_check
def linear_items(frame):
    """Panels of columns, for every chunk of rows."""
    return dim(frame, _PANELS, 1) * ((dim(frame, _X, 0) + ROWS - 1) // ROWS)


@compiled
@no_type_check
def copy(source, source_stride, target, target_stride, rows, columns):
    """The first `columns` numbers of each row, of addresses."""
    numbers, copies = floats(source), floats(target)
    for row in range(rows):
        for index in range(columns):
            copies[row * target_stride + index] = numbers[row * source_stride + index]


@no_type_check
def _linear(frame, item, scratch):
    rows, inner = dim(frame, _X, 0), dim(frame, _X, 1)
    num_panels, width = dim(frame, _PANELS, 1), ffi.result_dim(frame, 1)
    chunk, panel = item // num_panels, item % num_panels
    first = chunk * ROWS
    last = min(first + ROWS, rows)
    live = min(max(integer(frame, _NUM_ROWS) - first, 0), last - first)
    column = panel * PANEL
    columns = min(PANEL, width - column)
    x = operand(frame, _X) + 4 * first * inner
    y = result(frame) + 4 * (first * width + column)
    matrix = operand(frame, _PANELS)
    matrix += 4 * (integer(frame, _LAYER) * num_panels + panel) * inner * PANEL
    # The last panel may be wider than what is left of a row: its product is put together elsewhere.
    is_whole = columns == PANEL
    sums = y if is_whole else scratch
    stride = width if is_whole else PANEL
    adds = ffi.num_operands(frame) > _ADDED
    if adds:
        added = operand(frame, _ADDED) + 4 * (first * width + column)
        copy(added, width, sums, stride, live, columns)
    for start in range(0, inner, INNER):
        count = min(INNER, inner - start)
        panel_product(
            x + 4 * start, inner, matrix + 4 * start * PANEL, PANEL,
            sums, stride, live, count, adds or start > 0,
        )  # fmt: skip
    if not is_whole:
        copy(sums, stride, y, width, live, columns)
    clear(y + 4 * live * width, last - first - live, width, 0, columns)


@no_type_check
def _head_items(frame):
    return (dim(frame, _TABLE, 0) + ROWS - 1) // ROWS


@no_type_check
def _head(frame, item, scratch):
    """Logits of `ROWS` tokens for all live rows, by which the table's rows are multiplied."""
    inner, padded = dim(frame, _COLUMNS, 0), dim(frame, _COLUMNS, 1)
    vocabulary, num_rows = dim(frame, _TABLE, 0), ffi.result_dim(frame, 0)
    first = item * ROWS
    tokens = min(ROWS, vocabulary - first)
    live = min(integer(frame, _NUM_COLUMNS), num_rows)
    table = operand(frame, _TABLE) + 4 * first * inner
    out = floats(result(frame))
    found = floats(scratch)
    column = 0
    while column < live:
        columns = operand(frame, _COLUMNS) + 4 * column
        count = min(PANEL, live - column)
        if count > PANEL - LANES:
            panel_product(table, inner, columns, padded, scratch, PANEL, tokens, inner, False)
        else:
            for strip in range(0, count, LANES):
                strip_product(
                    table, inner, columns + 4 * strip, padded,
                    scratch + 4 * strip, PANEL, tokens, inner, False,
                )  # fmt: skip
        for row in range(count):
            at = (column + row) * vocabulary + first
            for token in range(tokens):
                out[at + token] = found[token * PANEL + row]
        column += PANEL
    clear(result(frame) + 4 * live * vocabulary, num_rows - live, vocabulary, first, first + tokens)


ffi.register("jaxpaged.linear", count=linear_items, work=_linear)
ffi.register("jaxpaged.head", count=_head_items, work=_head)
