"""Prefill attention on a CPU: a tile of queries at a time, for one head of keys.

A tile of keys is copied and turned around once for all of these queries; then scores and weighted
values are products of matrices.
"""

from typing import TYPE_CHECKING, no_type_check

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
from pallas_kernels.llvm.instructions import floats, ints
from pallas_kernels.llvm.softmax import MASKED, TILE, accumulate
from pallas_kernels.llvm.tiles import panel_product, turn
from pallas_kernels.llvm.vectors import PANEL
from pallas_kernels.xla import TILE_QUERIES

if TYPE_CHECKING:
    from pallas_kernels.api import PrefillTiles

_LANES_OF, _STARTS, _LENS, _POSITIONS, _USED, _ONTO = range(NUM_SHARED, NUM_SHARED + 6)

_TOGETHER = 16
"""Queries that values are added for at once: between the first and the last one's keys."""
_EXPONENT = 0x7F800000
"""Bits of a float32 number's exponent: all are set if it is infinite or not a number."""


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
    shared = shared_operands(q, k, v, layer, block_tables, window, scale, soft_cap)
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


@compiled
@no_type_check
def _copy(frame, lane, head, low, high, keys, values):
    """A head's keys and values at `low` to `high`, at their places in a tile.

    Returns the largest exponent of the values, as its bits.
    """
    kv_heads, width = dim(frame, K, 3), dim(frame, K, 4)
    k_tile, v_tile = floats(keys), floats(values)
    largest = 0
    position = low
    while position < high:
        k_at, run = slot(frame, K, lane, position)
        v_at, _ = slot(frame, V, lane, position)
        run = min(run, high - position)
        for offset in range(run):
            from_slot = 4 * (offset * kv_heads + head) * width
            k_row, v_row = floats(k_at + from_slot), floats(v_at + from_slot)
            v_bits = ints(v_at + from_slot)
            at = (position + offset) % TILE * width
            for index in range(width):
                k_tile[at + index] = k_row[index]
            for index in range(width):
                v_tile[at + index] = v_row[index]
            for index in range(width):
                largest = max(largest, v_bits[index] & _EXPONENT)
        position += run
    return largest


@compiled
@no_type_check
def _mask(scores, group, seen_from, seen_to):
    """Hides the keys of a tile that a query does not see, in the row of each of its heads."""
    for row in range(group):
        numbers = floats(scores + 4 * row * TILE)
        for place in range(min(seen_from, TILE)):
            numbers[place] = MASKED
        for place in range(seen_to, TILE):
            numbers[place] = MASKED


@no_type_check
def _count(frame):
    return integer(frame, _USED) * dim(frame, K, 3)


@no_type_check
def _prefill(frame, item, scratch):
    heads, kv_heads, width = dim(frame, Q, 1), dim(frame, K, 3), dim(frame, K, 4)
    group = heads // kv_heads
    tile, head = item // kv_heads, item % kv_heads
    lane = ints(operand(frame, _LANES_OF))[tile]
    token = ints(operand(frame, _STARTS))[tile]
    queries = ints(operand(frame, _LENS))[tile]
    position = ints(operand(frame, _POSITIONS))[tile]
    window = integer(frame, WINDOW)
    end = position + queries

    # A row for each query and each of its heads that go with this head of keys.
    rows = queries * group
    q = scratch
    weighted = q + 4 * rows * width
    scores = weighted + 4 * rows * width
    states = scores + 4 * rows * TILE
    keys = states + 8 * rows
    values = keys + 4 * TILE * width
    turned = values + 4 * TILE * width
    factor = query_factor(frame)
    for row in range(rows):
        of_token = ((token + row // group) * heads + head * group + row % group) * width
        start_row(
            operand(frame, Q) + 4 * of_token, factor,
            q + 4 * row * width, weighted + 4 * row * width, states + 8 * row, width,
        )  # fmt: skip

    low = max(position - window + 1, 0)
    while low < end:
        first = low // TILE * TILE
        high = min(first + TILE, end)
        exponent = _copy(frame, lane, head, low, high, keys, values)
        # Places of the tile that were not copied to hold anything; their scores are masked.
        turn(keys, width, turned, TILE, TILE, width)
        # Queries in front of these keys see none of them.
        blind = min(max(first - position, 0), queries)
        row = blind * group
        for column in range(0, TILE, PANEL):
            panel_product(
                q + 4 * row * width, width, turned + 4 * column, TILE,
                scores + 4 * (row * TILE + column), TILE, rows - row, width, False,
            )  # fmt: skip
        cap(frame, scores + 4 * row * TILE, (rows - row) * TILE)
        for query in range(blind, queries):
            row = query * group
            seen_from = max(position + query - window + 1, low) - first
            seen_to = min(position + query + 1, high) - first
            _mask(scores + 4 * row * TILE, group, seen_from, seen_to)
            for row in range(query * group, (query + 1) * group):
                accumulate(
                    scores + 4 * row * TILE, states + 8 * row, weighted + 4 * row * width, width
                )
        # Zero times what is not finite is not zero: then each query takes what it sees and no more.
        step = _TOGETHER if exponent < _EXPONENT else 1
        for query in range(blind, queries, step):
            row, count = query * group, min(step, queries - query)
            seen_from = max(position + query - window + 1, low) - first
            seen_to = min(position + query + count, high) - first
            if seen_from < seen_to:
                add_values(
                    scores + 4 * (row * TILE + seen_from),
                    values + 4 * seen_from * width,
                    width,
                    weighted + 4 * row * width,
                    count * group,
                    seen_to - seen_from,
                    width,
                )
        low = high
    for row in range(rows):
        of_token = ((token + row // group) * heads + head * group + row % group) * width
        total = floats(states)[2 * row + 1]
        divide(weighted + 4 * row * width, total, result(frame) + 4 * of_token, width)


ffi.register("jaxpaged.prefill", count=_count, work=_prefill)
