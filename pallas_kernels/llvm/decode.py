"""Decode attention on a CPU: a query at a time, its keys and values read from the pool as they lie.

The memory sets the pace: what is read next is asked for while products go on.
"""

from typing import no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.kv_format import KVRows
from pallas_kernels.llvm import ffi
from pallas_kernels.llvm.compiler import compiled
from pallas_kernels.llvm.context import (
    NUM_SHARED,
    WINDOW,
    AnyArray,
    K,
    Q,
    V,
    add_values,
    cap,
    divide,
    query_factor,
    shared_operands,
    slot,
    start_row,
)
from pallas_kernels.llvm.ffi import dim, integer, operand, result
from pallas_kernels.llvm.instructions import floats, ints, prefetch
from pallas_kernels.llvm.softmax import MASKED, TILE, accumulate
from pallas_kernels.llvm.tiles import dot_product, dots
from pallas_kernels.llvm.vectors import LANES

_LANES_OF, _CONTEXT_LENS, _NUM_QUERIES = range(NUM_SHARED, NUM_SHARED + 3)


def decode_attention(
    q: Float[Array, "T H D"],
    k: KVRows,
    v: KVRows,
    *,
    layer: Int[Array, ""],
    block_tables: Int[AnyArray, "B W"],
    token_lanes: Int[AnyArray, " T"],
    context_lens: Int[AnyArray, " T"],
    num_queries: Int[AnyArray, ""],
    window: Int[AnyArray, ""],
    scale: float,
    soft_cap: float | None = None,
) -> Float[Array, "T H D"]:
    """Decode attention; see `pallas_kernels.api.decode_attention`."""
    shared = shared_operands(q, k, v, layer, block_tables, window, scale, soft_cap)
    own = (jnp.asarray(x, jnp.int32) for x in (token_lanes, context_lens, num_queries))
    # Each head's query, weighted sum, scores, largest score and sum of weights.
    scratch = q.shape[1] * (2 * q.shape[2] + TILE + 2)
    result = jax.ShapeDtypeStruct(q.shape, jnp.float32)
    return ffi.ffi_call("jaxpaged.decode", result, *shared, *own, scratch=scratch)


@compiled
@no_type_check
def _score(frame, lane, low, high, end, q, scores):
    """Scores of all heads for the keys at `low` to `high`, which lie in one tile.

    Asks for the values of these keys and for the keys of the next block, up to `end`.
    """
    heads, kv_heads, width = dim(frame, Q, 1), dim(frame, K, 3), dim(frame, K, 4)
    group = heads // kv_heads
    row_bytes = 4 * kv_heads * width
    position = low
    while position < high:
        keys, run = slot(frame, K, lane, position)
        values, _ = slot(frame, V, lane, position)
        run = min(run, high - position)
        keys_ahead = keys
        if position + run < end:
            keys_ahead, _ = slot(frame, K, lane, position + run)
        key = 0
        while key < run:
            # As many keys at once as a vector has lanes, or what is left one by one.
            many = LANES if key + LANES <= run else 1
            line, last_line = key * row_bytes, (key + many) * row_bytes
            # Only so much can be under way at a time: a little is asked for before each product.
            step = (last_line - line) // heads
            for head in range(kv_heads):
                k_at = keys + 4 * (key * kv_heads + head) * width
                for row in range(head * group, (head + 1) * group):
                    upto = min(line + step, last_line)
                    while line < upto:
                        prefetch(keys_ahead + line)
                        prefetch(values + line)
                        line += 64
                    to = scores + 4 * (row * TILE + (position + key) % TILE)
                    if many > 1:
                        dots(q + 4 * row * width, k_at, kv_heads * width, to, width)
                    else:
                        dot_product(q + 4 * row * width, k_at, to, width)
            key += many
        position += run


@compiled
@no_type_check
def _weigh(frame, lane, low, high, scores, weighted):
    """Adds the values at `low` to `high`, by the weights that their scores have become."""
    kv_heads, width = dim(frame, K, 3), dim(frame, K, 4)
    group = dim(frame, Q, 1) // kv_heads
    position = low
    while position < high:
        values, run = slot(frame, V, lane, position)
        run = min(run, high - position)
        for head in range(kv_heads):
            add_values(
                scores + 4 * (head * group * TILE + position % TILE),
                values + 4 * head * width,
                kv_heads * width,
                weighted + 4 * head * group * width,
                group,
                run,
                width,
            )
        position += run


@no_type_check
def _count(frame):
    return dim(frame, Q, 0)


@no_type_check
def _decode(frame, query, scratch):
    heads, width = dim(frame, Q, 1), dim(frame, Q, 2)
    out = result(frame) + 4 * query * heads * width
    if query >= integer(frame, _NUM_QUERIES):
        row = floats(out)
        for index in range(heads * width):
            row[index] = 0.0
        return
    lane = ints(operand(frame, _LANES_OF))[query]
    end = ints(operand(frame, _CONTEXT_LENS))[query]

    q = scratch
    weighted = q + 4 * heads * width
    scores = weighted + 4 * heads * width
    states = scores + 4 * heads * TILE
    given, factor = operand(frame, Q) + 4 * query * heads * width, query_factor(frame)
    for head in range(heads):
        at = 4 * head * width
        start_row(given + at, factor, q + at, weighted + at, states + 8 * head, width)

    low = max(end - integer(frame, WINDOW), 0)
    while low < end:
        high = min(low // TILE * TILE + TILE, end)
        if high - low < TILE:
            row = floats(scores)
            for index in range(heads * TILE):
                row[index] = MASKED
        _score(frame, lane, low, high, end, q, scores)
        for head in range(heads):
            of_head = scores + 4 * head * TILE
            cap(frame, of_head + 4 * (low % TILE), high - low)
            accumulate(of_head, states + 8 * head, weighted + 4 * head * width, width)
        _weigh(frame, lane, low, high, scores, weighted)
        low = high
    for head in range(heads):
        at = 4 * head * width
        divide(weighted + at, floats(states)[2 * head + 1], out + at, width)


ffi.register("jaxpaged.decode", count=_count, work=_decode)
