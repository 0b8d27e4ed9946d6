"""What decode and prefill attention share: their first operands, and a context's keys and values.

A query's result is put together tile by tile of its keys, in rows: one for each query head. The
softmax is that of `softmax`, so scores are taken times `LOG2_E`.
"""

import math
from typing import no_type_check

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.kv_format import KVRows
from pallas_kernels.llvm import ffi
from pallas_kernels.llvm.compiler import compiled
from pallas_kernels.llvm.ffi import dim, integer, operand
from pallas_kernels.llvm.instructions import floats, ints
from pallas_kernels.llvm.softmax import LEAST, LOG2_E, TILE
from pallas_kernels.llvm.tiles import panel_product, strip_product
from pallas_kernels.llvm.vectors import LANES, PANEL

AnyArray = Array | np.ndarray

Q, K, V, LAYER, TABLES, WINDOW, SCALE, SOFT_CAP = range(8)
"""Operands of both, in this order; each one's own follow."""
NUM_SHARED = 8


def shared_operands(
    q: Float[Array, "T H D"],
    k: KVRows,
    v: KVRows,
    layer: Int[Array, ""],
    block_tables: Int[AnyArray, "B W"],
    window: Int[AnyArray, ""],
    scale: float,
    soft_cap: float | None,
) -> tuple[Array, ...]:
    """The first operands of a call."""
    return (
        q,
        k.values,
        v.values,
        jnp.asarray(layer, jnp.int32),
        jnp.asarray(block_tables, jnp.int32),
        jnp.asarray(window, jnp.int32),
        jnp.float32(scale),
        jnp.float32(soft_cap or 0.0),
    )


@compiled
@no_type_check
def slot(frame, rows, lane, position):
    """Where a position's row of keys or values lies; how many rows from there are in its block."""
    num_blocks, block_size = dim(frame, K, 1), dim(frame, K, 2)
    row_bytes = 4 * dim(frame, K, 3) * dim(frame, K, 4)
    tables = ints(operand(frame, TABLES))
    offset = position % block_size
    block = tables[lane * dim(frame, TABLES, 1) + position // block_size]
    slot = (integer(frame, LAYER) * num_blocks + block) * block_size + offset
    return operand(frame, rows) + row_bytes * slot, block_size - offset


@compiled
@no_type_check
def query_factor(frame):
    """What queries are multiplied by, so that products are scores as the softmax takes them."""
    scale = ffi.number(frame, SCALE)
    return scale if ffi.number(frame, SOFT_CAP) > 0 else scale * np.float32(LOG2_E)


@compiled
@no_type_check
def cap(frame, scores, count):
    """Scores that go to infinity go to the cap."""
    cap = ffi.number(frame, SOFT_CAP)
    if cap > 0:
        values = floats(scores)
        for index in range(count):
            values[index] = cap * math.tanh(values[index] / cap) * np.float32(LOG2_E)


@compiled
@no_type_check
def add_values(weights, values, values_stride, weighted, rows, keys, width):
    """Adds `weights @ values` to the sums."""
    column = 0
    while column + PANEL <= width:
        panel_product(
            weights,
            TILE,
            values + 4 * column,
            values_stride,
            weighted + 4 * column,
            width,
            rows,
            keys,
            True,
        )
        column += PANEL
    while column < width:
        strip_product(
            weights,
            TILE,
            values + 4 * column,
            values_stride,
            weighted + 4 * column,
            width,
            rows,
            keys,
            True,
        )
        column += LANES


@compiled
@no_type_check
def divide(weighted, total, out, width):
    """The attention of a row that is done; zero if it saw nothing."""
    sums, row = floats(weighted), floats(out)
    inverse = np.float32(1.0) / total if total != 0 else np.float32(0.0)
    for index in range(width):
        row[index] = sums[index] * inverse


@compiled
@no_type_check
def start_row(q, factor, scaled, weighted, state, width):
    """A row that has seen nothing yet: its query, made ready for products, and no sums.

    Args:
        q: Address of the query.
        factor: What it is multiplied by.
        scaled: Address that the query is put to.
        weighted: Address of the weighted sum of values.
        state: Address of the largest score and of the sum of weights.
        width: Numbers of a head.
    """
    given, ready, sums, running = floats(q), floats(scaled), floats(weighted), floats(state)
    for index in range(width):
        ready[index] = given[index] * factor
        sums[index] = 0.0
    running[0] = LEAST
    running[1] = 0.0
