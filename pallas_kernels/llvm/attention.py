"""Paged attention on a CPU: one pass over the live keys, in the registers and the caches of a core.

Decode takes a query at a time and reads keys and values from the pool as they lie. Prefill takes a
tile of queries, for which a tile of keys is turned around once. Keys are taken in tiles at fixed
positions, so a query's result depends neither on its neighbours nor on the block size.
"""

import math
from typing import TYPE_CHECKING, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.kv_format import KVRows
from pallas_kernels.llvm import ffi
from pallas_kernels.llvm.compiler import compiled
from pallas_kernels.llvm.ffi import dim, integer, operand, result
from pallas_kernels.llvm.instructions import floats, ints, prefetch
from pallas_kernels.llvm.softmax import LEAST, LOG2_E, MASKED, TILE, accumulate
from pallas_kernels.llvm.tiles import (
    dot_products,
    dots_with_many,
    panel_product,
    strip_product,
    turn,
)
from pallas_kernels.llvm.vectors import LANES, PANEL
from pallas_kernels.xla import TILE_QUERIES

if TYPE_CHECKING:
    from pallas_kernels.api import PrefillTiles

AnyArray = Array | np.ndarray

# Operands that both functions have, in this order; their own ones follow.
_Q, _K, _V, _LAYER, _TABLES, _WINDOW, _SCALE, _SOFT_CAP = range(8)
_LANES_OF, _CONTEXT_LENS, _NUM_QUERIES = 8, 9, 10
_TILE_LANES, _TILE_STARTS, _TILE_LENS, _TILE_POSITIONS, _TILES_USED, _ONTO = range(8, 14)

_QUERIES = 16
"""Queries that values are added for at once: between the first and the last one's keys."""
_EXPONENT = 0x7F800000
"""Bits of a float32 number's exponent: all are set if it is infinite or not a number."""


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
    shared = _shared_operands(q, k, v, layer, block_tables, window, scale, soft_cap)
    own = (jnp.asarray(x, jnp.int32) for x in (token_lanes, context_lens, num_queries))
    # Each head's query, weighted sum, scores, largest score and sum of weights.
    scratch = q.shape[1] * (2 * q.shape[2] + TILE + 2)
    result = jax.ShapeDtypeStruct(q.shape, jnp.float32)
    return ffi.ffi_call("jaxpaged.decode", result, *shared, *own, scratch=scratch)


def prefill_attention(
    q: Float[Array, "T H D"],
    k: KVRows,
    v: KVRows,
    onto: Float[Array, "T H D"],
    *,
    layer: Int[Array, ""],
    block_tables: Int[AnyArray, "B W"],
    tiles: "PrefillTiles",
    window: Int[AnyArray, ""],
    scale: float,
    soft_cap: float | None = None,
) -> Float[Array, "T H D"]:
    """Prefill attention; see `pallas_kernels.api.prefill_attention`."""
    shared = _shared_operands(q, k, v, layer, block_tables, window, scale, soft_cap)
    own = (
        jnp.asarray(x, jnp.int32)
        for x in (tiles.lanes, tiles.starts, tiles.lens, tiles.positions, tiles.used)
    )
    # As for decode, for each row of a tile; the keys, the values, the keys turned.
    num_rows = min(TILE_QUERIES, q.shape[0]) * (q.shape[1] // k.values.shape[3])
    scratch = num_rows * (2 * q.shape[2] + TILE + 2) + 3 * TILE * q.shape[2]
    return ffi.ffi_call(
        "jaxpaged.prefill",
        jax.ShapeDtypeStruct(q.shape, jnp.float32),
        *shared,
        *own,
        onto,
        scratch=scratch,
        aliases={_ONTO: 0},
    )


def _shared_operands(
    q: Float[Array, "T H D"],
    k: KVRows,
    v: KVRows,
    layer: Int[Array, ""],
    block_tables: Int[AnyArray, "B W"],
    window: Int[AnyArray, ""],
    scale: float,
    soft_cap: float | None,
) -> tuple[Array, ...]:
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
def _slot(frame, rows, lane, position):
    """Where a position's row of keys or values lies; how many rows from there are in its block."""
    num_blocks, block_size = dim(frame, _K, 1), dim(frame, _K, 2)
    row_bytes = 4 * dim(frame, _K, 3) * dim(frame, _K, 4)
    tables = ints(operand(frame, _TABLES))
    offset = position % block_size
    block = tables[lane * dim(frame, _TABLES, 1) + position // block_size]
    slot = (integer(frame, _LAYER) * num_blocks + block) * block_size + offset
    return operand(frame, rows) + row_bytes * slot, block_size - offset


@compiled
@no_type_check
def _query_factor(frame):
    """What queries are multiplied by, so that products are scores as the softmax takes them."""
    scale = ffi.number(frame, _SCALE)
    return scale if ffi.number(frame, _SOFT_CAP) > 0 else scale * np.float32(LOG2_E)


@compiled
@no_type_check
def _cap(frame, scores, count):
    """Scores that go to infinity go to the cap."""
    cap = ffi.number(frame, _SOFT_CAP)
    if cap > 0:
        values = floats(scores)
        for index in range(count):
            values[index] = cap * math.tanh(values[index] / cap) * np.float32(LOG2_E)


@compiled
@no_type_check
def _add_values(weights, values, values_stride, weighted, rows, keys, width):
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
def _divide(weighted, total, out, width):
    """The attention of a row that is done; zero if it saw nothing."""
    sums, row = floats(weighted), floats(out)
    inverse = np.float32(1.0) / total if total != 0 else np.float32(0.0)
    for index in range(width):
        row[index] = sums[index] * inverse


@no_type_check
def _decode_count(frame):
    return dim(frame, _Q, 0)


@no_type_check
def _decode(frame, query, scratch):
    heads, width = dim(frame, _Q, 1), dim(frame, _Q, 2)
    kv_heads = dim(frame, _K, 3)
    group = heads // kv_heads
    out = result(frame) + 4 * query * heads * width
    if query >= integer(frame, _NUM_QUERIES):
        row = floats(out)
        for index in range(heads * width):
            row[index] = 0.0
        return
    lane = ints(operand(frame, _LANES_OF))[query]
    end = ints(operand(frame, _CONTEXT_LENS))[query]
    start = max(end - integer(frame, _WINDOW), 0)
    factor = _query_factor(frame)
    row_bytes = 4 * kv_heads * width

    q = scratch
    weighted = q + 4 * heads * width
    scores = weighted + 4 * heads * width
    states = scores + 4 * heads * TILE
    given, scaled, sums = floats(operand(frame, _Q)), floats(q), floats(weighted)
    for index in range(heads * width):
        scaled[index] = given[query * heads * width + index] * factor
        sums[index] = 0.0
    running = floats(states)
    for head in range(heads):
        running[2 * head] = LEAST
        running[2 * head + 1] = 0.0

    first = start // TILE * TILE
    while first < end:
        low, high = max(first, start), min(first + TILE, end)
        if high - low < TILE:
            row = floats(scores)
            for index in range(heads * TILE):
                row[index] = MASKED
        position = low
        while position < high:
            keys, run = _slot(frame, _K, lane, position)
            run = min(run, high - position)
            values, _ = _slot(frame, _V, lane, position)
            ahead = position + run
            if ahead < end:
                keys_ahead, _ = _slot(frame, _K, lane, ahead)
            else:
                keys_ahead = keys
            key = 0
            while key < run:
                # As many keys at once as a vector has lanes, or what is left one by one. What is
                # read next is asked for a little at a time: it comes while the products go on.
                many = LANES if key + LANES <= run else 1
                line, last_line = key * row_bytes, (key + many) * row_bytes
                step = (last_line - line) // heads
                for head in range(kv_heads):
                    k_at = keys + 4 * (key * kv_heads + head) * width
                    for row in range(head * group, (head + 1) * group):
                        upto = min(line + step, last_line)
                        while line < upto:
                            prefetch(keys_ahead + line)
                            prefetch(values + line)
                            line += 64
                        row_q = q + 4 * row * width
                        to = scores + 4 * (row * TILE + position + key - first)
                        if many > 1:
                            dots_with_many(row_q, k_at, kv_heads * width, to, width)
                        else:
                            dot_products(row_q, width, k_at, to, TILE, 1, width)
                key += many
            position += run
        if ffi.number(frame, _SOFT_CAP) > 0:
            for head in range(heads):
                _cap(frame, scores + 4 * (head * TILE + low - first), high - low)
        for head in range(heads):
            accumulate(
                scores + 4 * head * TILE, states + 8 * head, weighted + 4 * head * width, width
            )
        position = low
        while position < high:
            values_at, run = _slot(frame, _V, lane, position)
            run = min(run, high - position)
            for head in range(kv_heads):
                _add_values(
                    scores + 4 * (head * group * TILE + position - first),
                    values_at + 4 * head * width,
                    kv_heads * width,
                    weighted + 4 * head * group * width,
                    group,
                    run,
                    width,
                )
            position += run
        first += TILE
    for head in range(heads):
        _divide(weighted + 4 * head * width, running[2 * head + 1], out + 4 * head * width, width)


ffi.register("jaxpaged.decode", count=_decode_count, work=_decode)


@no_type_check
def _prefill_count(frame):
    return integer(frame, _TILES_USED) * dim(frame, _K, 3)


@no_type_check
def _prefill(frame, item, scratch):
    heads, width = dim(frame, _Q, 1), dim(frame, _Q, 2)
    kv_heads = dim(frame, _K, 3)
    group = heads // kv_heads
    tile, head = item // kv_heads, item % kv_heads
    lane = ints(operand(frame, _TILE_LANES))[tile]
    token = ints(operand(frame, _TILE_STARTS))[tile]
    num_queries = ints(operand(frame, _TILE_LENS))[tile]
    position = ints(operand(frame, _TILE_POSITIONS))[tile]
    window = integer(frame, _WINDOW)
    start, end = max(position - window + 1, 0), position + num_queries
    rows = num_queries * group
    factor = _query_factor(frame)

    # For one head of keys: its queries, a row for each query and head of the group.
    q = scratch
    weighted = q + 4 * rows * width
    scores = weighted + 4 * rows * width
    states = scores + 4 * rows * TILE
    k_tile = states + 8 * rows
    v_tile = k_tile + 4 * TILE * width
    turned = v_tile + 4 * TILE * width
    scaled, sums, running = floats(q), floats(weighted), floats(states)
    given = floats(operand(frame, _Q))
    for query in range(num_queries):
        at = ((token + query) * heads + head * group) * width
        for index in range(group * width):
            scaled[query * group * width + index] = given[at + index] * factor
    for index in range(rows * width):
        sums[index] = 0.0
    for row in range(rows):
        running[2 * row] = LEAST
        running[2 * row + 1] = 0.0

    keys, values = floats(k_tile), floats(v_tile)
    first = start // TILE * TILE
    while first < end:
        low, high = max(first, start), min(first + TILE, end)
        largest_exponent = 0
        key = low
        while key < high:
            k_at, run = _slot(frame, _K, lane, key)
            v_at, _ = _slot(frame, _V, lane, key)
            run = min(run, high - key)
            for offset in range(run):
                k_row = floats(k_at + 4 * (offset * kv_heads + head) * width)
                v_row = floats(v_at + 4 * (offset * kv_heads + head) * width)
                place = key + offset - first
                for index in range(width):
                    keys[place * width + index] = k_row[index]
                for index in range(width):
                    values[place * width + index] = v_row[index]
                v_bits = ints(v_at + 4 * (offset * kv_heads + head) * width)
                for index in range(width):
                    largest_exponent = max(largest_exponent, v_bits[index] & _EXPONENT)
            key += run
        # Rows of the tile that were not read hold anything; their scores are masked.
        turn(k_tile, width, turned, TILE, TILE, width)
        # Queries in front of these keys see none of them.
        blind = min(max(first - position, 0), num_queries) * group
        for column in range(0, TILE, PANEL):
            panel_product(
                q + 4 * blind * width, width, turned + 4 * column, TILE,
                scores + 4 * (blind * TILE + column), TILE, rows - blind, width, False,
            )  # fmt: skip
        _cap(frame, scores + 4 * blind * TILE, (rows - blind) * TILE)
        row_scores = floats(scores)
        for query in range(blind // group, num_queries):
            seen_from = max(position + query - window + 1, low) - first
            seen_to = min(position + query + 1, high) - first
            for row in range(query * group, (query + 1) * group):
                for place in range(min(seen_from, TILE)):
                    row_scores[row * TILE + place] = MASKED
                for place in range(seen_to, TILE):
                    row_scores[row * TILE + place] = MASKED
                accumulate(
                    scores + 4 * row * TILE, states + 8 * row, weighted + 4 * row * width, width
                )
        # Zero times what is not finite is not zero: then each query takes what it sees and no more.
        step = _QUERIES if largest_exponent < _EXPONENT else 1
        for query in range(blind // group, num_queries, step):
            count = min(step, num_queries - query)
            seen_from = max(position + query - window + 1, low)
            seen_to = min(position + query + count, high)
            if seen_from < seen_to:
                _add_values(
                    scores + 4 * (query * group * TILE + seen_from - first),
                    v_tile + 4 * (seen_from - first) * width,
                    width,
                    weighted + 4 * query * group * width,
                    count * group,
                    seen_to - seen_from,
                    width,
                )
        first += TILE
    out = result(frame)
    for row in range(rows):
        at = ((token + row // group) * heads + head * group + row % group) * width
        _divide(weighted + 4 * row * width, running[2 * row + 1], out + 4 * at, width)


ffi.register("jaxpaged.prefill", count=_prefill_count, work=_prefill)
