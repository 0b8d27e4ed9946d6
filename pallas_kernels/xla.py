"""Paged attention as plain XLA: loops over tiles of the live context, online softmax.

Both functions have one shape: an outer loop over query tiles, an inner loop over key/value tiles
from where the window begins to where the context ends, so work follows the live tokens and not the
table's width. Key/value tiles are aligned to absolute positions, their size is fixed, and a fully
masked tile changes no bit of the running softmax: so a query's result depends neither on its
neighbours in the tile nor on the block size.

The softmax is the online one of Milakov and Gimelshein (arXiv:1805.02867), as in FlashAttention.
"""

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from pallas_kernels import kv_format
from pallas_kernels.kv_format import KVRows
from pallas_kernels.partials import PARTITION_TOKENS, Partials

if TYPE_CHECKING:
    from pallas_kernels.api import PrefillTiles

AnyArray = Array | np.ndarray

DECODE_QUERIES = 8
"""Queries that share one decode tile."""
DECODE_TILE_TOKENS = 64
"""Keys of a decode tile per query: with 8 queries they and the values stay in a core's cache."""
TILE_QUERIES = 64
"""Query tokens of a prefill tile."""
PREFILL_TILE_TOKENS = 128
"""Keys of a prefill tile."""

# Far below any score, yet finite: exp(MASKED - MASKED) must be 1, not NaN.
MASKED = -1e30

NEVER = 2**30
"""A position behind every key."""

# Everything is float32 here; a GPU would round its products to TF32 otherwise.
EXACT = jax.lax.Precision.HIGHEST


class Softmax(NamedTuple):
    """A softmax-weighted sum over the keys seen so far; `R` are independent rows."""

    peak: Float[Array, "*R"]
    """Largest score."""
    total: Float[Array, "*R"]
    """Sum of exp(score - peak)."""
    weighted: Float[Array, "*R D"]
    """Sum of exp(score - peak) * value."""


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
    num_kv_heads, block_size = k.values.shape[3], k.values.shape[2]
    queries = min(DECODE_QUERIES, q.shape[0])
    tile = DECODE_TILE_TOKENS
    is_used = jnp.arange(q.shape[0]) < num_queries
    ends = jnp.where(is_used, context_lens, 0)
    # Unused queries see nothing, and start so late that no loop has to begin earlier for them.
    starts = jnp.where(is_used, jnp.maximum(ends - window, 0), NEVER)

    def query_group(group: Int[Array, ""], out: Float[Array, "T H D"]) -> Float[Array, "T H D"]:
        # The last group may reach past the end; start earlier then and compute some twice.
        first = jnp.minimum(group * queries, q.shape[0] - queries)
        q_tile, lanes, start, end = (
            jax.lax.dynamic_slice_in_dim(x, first, queries)
            for x in (q, jnp.asarray(token_lanes), starts, ends)
        )
        q_tile = q_tile.astype(jnp.float32).reshape(queries, num_kv_heads, -1, q.shape[2]) * scale

        def kv_tile(index: Int[Array, ""], softmax: Softmax) -> Softmax:
            keys = (index * tile + jnp.arange(tile))[None, :]
            seen = (keys >= start[:, None]) & (keys < end[:, None])
            where = _locate(block_tables, lanes, index, tile=tile, block_size=block_size)
            k_tile = _gather(k, layer, where, tile=tile)
            v_tile = jnp.where(seen[:, :, None, None], _gather(v, layer, where, tile=tile), 0)
            scores = jnp.einsum("bkgd,bckd->bkgc", q_tile, k_tile, precision=EXACT)
            scores = _capped(scores, soft_cap)
            return _accumulate(softmax, scores, v_tile, seen[:, None, None, :], "bkgc,bckd->bkgd")

        tiles = (jnp.min(start) // tile, (jnp.max(end) + tile - 1) // tile)
        softmax = jax.lax.fori_loop(*tiles, kv_tile, _start(q_tile))
        rows = _finish(softmax).reshape(queries, *q.shape[1:]).astype(q.dtype)
        return jax.lax.dynamic_update_slice_in_dim(out, rows, first, 0)

    num_groups = (num_queries + queries - 1) // queries
    return jax.lax.fori_loop(0, num_groups, query_group, jnp.zeros_like(q))


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
    num_kv_heads, block_size = k.values.shape[3], k.values.shape[2]
    num_heads, head_dim = q.shape[1:]
    queries = min(TILE_QUERIES, q.shape[0])
    tile = PREFILL_TILE_TOKENS

    def query_tile(index: Int[Array, ""], out: Float[Array, "T H D"]) -> Float[Array, "T H D"]:
        # A slice cannot start so late that it would reach past the end: it starts earlier then,
        # and rows of neighbouring tiles are left as they are.
        start, length, position = tiles.starts[index], tiles.lens[index], tiles.positions[index]
        first = jnp.minimum(start, q.shape[0] - queries)
        row = jnp.arange(queries) - (start - first)
        earliest, end = jnp.maximum(position - window + 1, 0), position + length
        q_tile = jax.lax.dynamic_slice_in_dim(q, first, queries).astype(jnp.float32)
        q_tile = q_tile.reshape(queries, num_kv_heads, -1, head_dim) * scale
        group = q_tile.shape[2]
        # Keys stand before queries: so the maximum and the sum over keys go through whole vectors
        # of queries, and both products read their arrays as they lie.
        q_tile = q_tile.transpose(1, 3, 2, 0).reshape(num_kv_heads, head_dim, -1)
        positions = jnp.tile(position + row, group)[None, None, :]
        lanes = tiles.lanes[index][None]

        def kv_tile(kv_index: Int[Array, ""], softmax: Softmax) -> Softmax:
            keys = kv_index * tile + jnp.arange(tile)
            places = keys[None, :, None]
            seen = (places <= positions) & (places > positions - window)
            where = _locate(block_tables, lanes, kv_index, tile=tile, block_size=block_size)
            k_tile = _gather(k, layer, where, tile=tile)[0]
            v_tile = _gather(v, layer, where, tile=tile)[0]
            # A weight of zero does not hide a NaN or an infinity from the queries before it. So
            # its score is NaN, which is masked like any other, and its value zero.
            is_sound = jnp.isfinite(v_tile).all(axis=-1)
            is_live = (keys >= earliest) & (keys < end)
            v_tile = jnp.where((is_sound & is_live[:, None])[:, :, None], v_tile, 0)
            scores = jnp.einsum("ckd,kdr->kcr", k_tile, q_tile, precision=EXACT)
            scores = _capped(scores, soft_cap)
            scores = jnp.where(is_sound.T[:, :, None], scores, jnp.nan)
            return _accumulate_columns(softmax, scores, v_tile, seen)

        kv_tiles = (earliest // tile, (end + tile - 1) // tile)
        peak = jnp.full((num_kv_heads, q_tile.shape[2]), MASKED, jnp.float32)
        nothing = Softmax(peak, jnp.zeros_like(peak), jnp.zeros_like(q_tile))
        softmax = jax.lax.fori_loop(*kv_tiles, kv_tile, nothing)
        rows = softmax.weighted / jnp.where(softmax.total > 0, softmax.total, 1.0)[:, None, :]
        rows = rows.reshape(num_kv_heads, head_dim, group, queries).transpose(3, 0, 2, 1)
        rows = rows.reshape(queries, num_heads, head_dim)
        is_ours = ((row >= 0) & (row < length))[:, None, None]
        kept = jax.lax.dynamic_slice_in_dim(out, first, queries)
        rows = jnp.where(is_ours, rows.astype(q.dtype), kept)
        return jax.lax.dynamic_update_slice_in_dim(out, rows, first, 0)

    return jax.lax.fori_loop(0, tiles.used, query_tile, onto)


def combine(
    partials: Partials, starts: Int[Array, " T"], ends: Int[Array, " T"], dtype: jnp.dtype
) -> Float[Array, "T K G D"]:
    """The merge of partial results; see `pallas_kernels.api.combine`."""
    partition = jnp.arange(partials.peak.shape[2])[None, :]
    first, last = starts // PARTITION_TOKENS, (ends - 1) // PARTITION_TOKENS
    is_live = (partition >= first[:, None]) & (partition <= last[:, None])
    is_live = (is_live & (starts < ends)[:, None])[:, None, :, None]
    peaks = jnp.where(is_live, partials.peak, MASKED)
    factors = jnp.where(is_live, jnp.exp(peaks - peaks.max(axis=2, keepdims=True)), 0)
    total = jnp.sum(jnp.where(is_live, partials.total, 0) * factors, axis=2)
    weighted = jnp.where(is_live[..., None], partials.weighted, 0) * factors[..., None]
    return _finish(Softmax(peaks.max(axis=2), total, weighted.sum(axis=2))).astype(dtype)


def _locate(
    block_tables: Int[AnyArray, "B W"],
    lanes: Int[Array, " R"],
    index: Int[Array, ""],
    *,
    tile: int,
    block_size: int,
) -> Int[Array, "R X"]:
    """Where tile `index` of each lane's keys lies in the pool: block ids, or slots.

    Slots where blocks do not fill a tile exactly, so that the tile's size, and with it the order
    in which keys are summed up, does not depend on the block size.
    """
    # Past the table's end are only masked keys, and any valid block will do.
    last = block_tables.shape[1] - 1
    lanes = lanes[:, None]
    if tile % block_size == 0:
        blocks = tile // block_size
        columns = jnp.minimum(index * blocks + jnp.arange(blocks), last)
        return jnp.asarray(block_tables)[lanes, columns[None, :]]
    positions = index * tile + jnp.arange(tile)
    columns = jnp.minimum(positions // block_size, last)
    ids = jnp.asarray(block_tables)[lanes, columns[None, :]]
    return ids * block_size + (positions % block_size)[None, :]


def _gather(
    rows: KVRows, layer: Int[Array, ""], where: Int[Array, "R X"], *, tile: int
) -> Float[Array, "R C K D"]:
    """The rows at what `_locate` found, decoded."""
    return kv_format.decode(
        _gather_array(rows.values, layer, where, tile=tile),
        None if rows.scales is None else _gather_array(rows.scales, layer, where, tile=tile),
    )


def _gather_array(
    array: Shaped[Array, "L N S K *X"],
    layer: Int[Array, ""],
    where: Int[Array, "R X"],
    *,
    tile: int,
) -> Shaped[Array, "R C K *X"]:
    # The pool as units of what `where` counts, blocks or slots; the reshapes are free.
    unit = tile // where.shape[1]
    units = array.reshape(array.shape[0], -1, unit, *array.shape[3:])
    found = units.at[layer, where].get(mode="promise_in_bounds")
    return found.reshape(where.shape[0], tile, *array.shape[3:])


def _capped(scores: Float[Array, "*R C"], soft_cap: float | None) -> Float[Array, "*R C"]:
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)


def _start(rows: Float[Array, "*R D"]) -> Softmax:
    peak = jnp.full(rows.shape[:-1], MASKED, jnp.float32)
    return Softmax(peak, jnp.zeros_like(peak), jnp.zeros(rows.shape, jnp.float32))


def _accumulate(
    softmax: Softmax,
    scores: Float[Array, "*R C"],
    v: Float[Array, "*X D"],
    seen: Bool[Array, "..."],
    product: str,
) -> Softmax:
    """Takes one key/value tile into the running softmax; `product` is weights times values."""
    scores = jnp.where(seen, scores, MASKED)
    peak = jnp.maximum(softmax.peak, scores.max(axis=-1))
    shrink = jnp.exp(softmax.peak - peak)
    weights = jnp.where(seen, jnp.exp(scores - peak[..., None]), 0)
    total = softmax.total * shrink + weights.sum(axis=-1)
    seen_now = jnp.einsum(product, weights, v, precision=EXACT)
    weighted = softmax.weighted * shrink[..., None] + seen_now
    return Softmax(peak, total, weighted)


def _accumulate_columns(
    softmax: Softmax,
    scores: Float[Array, "K C R"],
    v: Float[Array, "C K D"],
    seen: Bool[Array, "1 C R"],
) -> Softmax:
    """The same for prefill, where queries are columns and sums are `[K, D, R]`."""
    scores = jnp.where(seen, scores, MASKED)
    peak = jnp.maximum(softmax.peak, scores.max(axis=1))
    shrink = jnp.exp(softmax.peak - peak)
    weights = jnp.where(seen, jnp.exp(scores - peak[:, None, :]), 0)
    total = softmax.total * shrink + weights.sum(axis=1)
    seen_now = jnp.einsum("ckd,kcr->kdr", v, weights, precision=EXACT)
    return Softmax(peak, total, softmax.weighted * shrink[:, None, :] + seen_now)


def _finish(softmax: Softmax) -> Float[Array, "*R D"]:
    # Rows that saw no key (unused lanes, queries outside the tile) come out as zero.
    return softmax.weighted / jnp.where(softmax.total > 0, softmax.total, 1.0)[..., None]
