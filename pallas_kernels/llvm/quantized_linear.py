"""Linear maps by weights of few bits, of the live rows only; see `pallas_kernels.linear_map`.

Few rows, as in steps that decode, take each weight from memory into registers, where it becomes a
float. For many it becomes one in a core's cache, once for all rows of an item of work.
"""

import functools
from collections.abc import Callable
from typing import no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.linear_map import QuantizedPanels
from pallas_kernels.llvm import ffi
from pallas_kernels.llvm.ffi import dim, integer, operand, result
from pallas_kernels.llvm.linear_map import INNER, ROWS, TILE, clear, copy, linear_items
from pallas_kernels.llvm.quantized_tiles import (
    ROW_BYTES,
    SCALE_BYTES,
    dequantized_panel,
    few_rows_product,
)
from pallas_kernels.llvm.tiles import panel_product
from pallas_kernels.llvm.vectors import PANEL
from pallas_kernels.weight_format import GROUP, WeightDType

AnyArray = Array | np.ndarray

_MOST_FEW = 8
"""Rows up to which it is faster to take weights from memory into registers: those of a tile."""

assert INNER % GROUP == 0, "what is taken at once begins with a group"

_X, _VALUES, _LAYER, _NUM_ROWS, _SCALES = range(5)


def linear(
    x: Float[Array, "T I"],
    panels: QuantizedPanels,
    *,
    layer: Int[AnyArray, ""],
    num_rows: Int[AnyArray, ""],
    width: int,
    added: Float[Array, "T O"] | None = None,
) -> Float[Array, "T O"]:
    """See `pallas_kernels.linear_map.quantized_linear`."""
    name = _registered("int8" if panels.minimums is None else "int4")
    factors = [part for part in panels[1:] if part is not None]
    place = (jnp.asarray(layer, jnp.int32), jnp.asarray(num_rows, jnp.int32))
    operands = [x, panels.values, *place, *factors, *([] if added is None else [added])]
    result = jax.ShapeDtypeStruct((x.shape[0], width), jnp.float32)
    return ffi.ffi_call(name, result, *operands, scratch=TILE + INNER * PANEL)


@functools.cache
def _registered(weight_dtype: WeightDType) -> str:
    """The target for a format, which is compiled when it is first asked for."""
    name = f"jaxpaged.linear_{weight_dtype}"
    ffi.register(name, count=linear_items, work=_work(weight_dtype))
    return name


def _work(weight_dtype: WeightDType) -> Callable[..., None]:
    few, dequantize = few_rows_product(weight_dtype), dequantized_panel(weight_dtype)
    row_bytes, scale_bytes = ROW_BYTES[weight_dtype], SCALE_BYTES[weight_dtype]
    is_grouped = weight_dtype == "int4"
    minimums_at = _SCALES + is_grouped
    added_at = minimums_at + 1

    @no_type_check
    def work(frame, item, scratch):
        rows, inner = dim(frame, _X, 0), dim(frame, _X, 1)
        num_panels, width = dim(frame, _VALUES, 1), ffi.result_dim(frame, 1)
        chunk, panel = item // num_panels, item % num_panels
        first = chunk * ROWS
        last = min(first + ROWS, rows)
        live = min(max(integer(frame, _NUM_ROWS) - first, 0), last - first)
        column = panel * PANEL
        columns = min(PANEL, width - column)
        x = operand(frame, _X) + 4 * first * inner
        y = result(frame) + 4 * (first * width + column)
        place = integer(frame, _LAYER) * num_panels + panel
        values = operand(frame, _VALUES) + place * inner * row_bytes
        groups = dim(frame, _SCALES, 2)
        factors = place * groups * scale_bytes * PANEL
        scales = operand(frame, _SCALES) + factors
        minimums = operand(frame, minimums_at) + factors
        # The last panel may be wider than what is left of a row: its product is put together
        # elsewhere.
        is_whole = columns == PANEL
        sums = y if is_whole else scratch
        stride = width if is_whole else PANEL
        adds = ffi.num_operands(frame) > added_at
        if adds:
            added = operand(frame, added_at) + 4 * (first * width + column)
            copy(added, width, sums, stride, live, columns)
        for start in range(0, inner, INNER):
            count = min(INNER, inner - start)
            begun = adds or start > 0
            if live <= _MOST_FEW:
                few(
                    x + 4 * start, inner, values, scales, minimums,
                    sums, stride, live, count, begun,
                )  # fmt: skip
            else:
                weights = scratch + 4 * TILE
                dequantize(values, scales, minimums, weights, count)
                panel_product(
                    x + 4 * start, inner, weights, PANEL, sums, stride, live, count, begun
                )
            values += count * row_bytes
            if is_grouped:
                scales += count // GROUP * scale_bytes * PANEL
                minimums += count // GROUP * scale_bytes * PANEL
        if not is_whole:
            copy(sums, stride, y, width, live, columns)
        clear(y + 4 * live * width, last - first - live, width, 0, columns)

    return work
