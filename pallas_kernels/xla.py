"""Paged attention as plain XLA: loops over tiles of the live context, online softmax.

Both functions have one shape: an outer loop over query tiles, an inner loop over key/value tiles
that stops where the context does, so work follows the live tokens and not the table's width.
Key/value tiles are aligned to absolute positions and a fully masked tile changes no bit of the
running softmax, so a query's result does not depend on its neighbours in the tile.

The softmax is the online one of Milakov and Gimelshein (arXiv:1805.02867), as in FlashAttention.
"""

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

if TYPE_CHECKING:
    from pallas_kernels.api import PrefillTiles

DECODE_LANES = 8
"""Lanes that share one decode tile."""
DECODE_TILE_TOKENS = 64
"""Keys of a decode tile per lane: with 8 lanes its keys and values stay in a core's cache."""
TILE_QUERIES = 64
"""Query tokens of a prefill tile."""
PREFILL_TILE_TOKENS = 128
"""Keys of a prefill tile."""

# Far below any score, yet finite: exp(MASKED - MASKED) must be 1, not NaN.
MASKED = -1e30


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


def tile_blocks(tile_tokens: int, block_size: int) -> int:
    """Blocks of a key/value tile that holds about `tile_tokens` tokens."""
    return max(1, tile_tokens // block_size)


def decode_attention(
    q: Float[Array, "B H D"],
    k_pool: Shaped[Array, "L N S K D"],
    v_pool: Shaped[Array, "L N S K D"],
    *,
    layer: Int[Array, ""],
    block_tables: Int[Array | np.ndarray, "B W"],
    context_lens: Int[Array | np.ndarray, " B"],
    num_lanes: Int[Array | np.ndarray, ""],
    scale: float,
) -> Float[Array, "B H D"]:
    """Decode attention; see `pallas_kernels.api.decode_attention`."""
    num_kv_heads = k_pool.shape[3]
    lanes = min(DECODE_LANES, q.shape[0])
    blocks = tile_blocks(DECODE_TILE_TOKENS, k_pool.shape[2])
    tile = blocks * k_pool.shape[2]
    block_tables = _whole_tiles(block_tables, blocks)
    context_lens = jnp.where(jnp.arange(q.shape[0]) < num_lanes, context_lens, 0)

    def lane_group(group: Int[Array, ""], out: Float[Array, "B H D"]) -> Float[Array, "B H D"]:
        # The last group may reach past the end; start earlier then and compute some lanes twice.
        first = jnp.minimum(group * lanes, q.shape[0] - lanes)
        q_tile = jax.lax.dynamic_slice_in_dim(q, first, lanes).astype(jnp.float32)
        q_tile = q_tile.reshape(lanes, num_kv_heads, -1, q.shape[2]) * scale
        tables = jax.lax.dynamic_slice_in_dim(block_tables, first, lanes)
        lens = jax.lax.dynamic_slice_in_dim(context_lens, first, lanes)

        def kv_tile(index: Int[Array, ""], softmax: Softmax) -> Softmax:
            ids = jax.lax.dynamic_slice_in_dim(tables, index * blocks, blocks, axis=1)
            seen = (index * tile + jnp.arange(tile))[None, :] < lens[:, None]
            k = _gather(k_pool, layer, ids, tokens=tile)
            v = jnp.where(seen[:, :, None, None], _gather(v_pool, layer, ids, tokens=tile), 0)
            scores = jnp.einsum("bkgd,bckd->bkgc", q_tile, k, precision=EXACT)
            return _accumulate(softmax, scores, v, seen[:, None, None, :], "bkgc,bckd->bkgd")

        num_tiles = (jnp.max(lens) + tile - 1) // tile
        softmax = jax.lax.fori_loop(0, num_tiles, kv_tile, _start(q_tile))
        rows = _finish(softmax).reshape(lanes, *q.shape[1:]).astype(q.dtype)
        return jax.lax.dynamic_update_slice_in_dim(out, rows, first, 0)

    num_groups = (num_lanes + lanes - 1) // lanes
    return jax.lax.fori_loop(0, num_groups, lane_group, jnp.zeros_like(q))


def prefill_attention(
    q: Float[Array, "T H D"],
    k_pool: Shaped[Array, "L N S K D"],
    v_pool: Shaped[Array, "L N S K D"],
    *,
    layer: Int[Array, ""],
    block_tables: Int[Array | np.ndarray, "B W"],
    tiles: "PrefillTiles",
    scale: float,
) -> Float[Array, "T H D"]:
    """Prefill attention; see `pallas_kernels.api.prefill_attention`."""
    num_kv_heads = k_pool.shape[3]
    queries = min(TILE_QUERIES, q.shape[0])
    blocks = tile_blocks(PREFILL_TILE_TOKENS, k_pool.shape[2])
    tile = blocks * k_pool.shape[2]
    block_tables = _whole_tiles(block_tables, blocks)

    def query_tile(index: Int[Array, ""], out: Float[Array, "T H D"]) -> Float[Array, "T H D"]:
        # A slice cannot start so late that it would reach past the end: `skip` leads to the
        # tile's first query, and rows of neighbouring tiles are left as they are.
        start, length = tiles.starts[index], tiles.lens[index]
        first = jnp.minimum(start, q.shape[0] - queries)
        skip = start - first
        row = jnp.arange(queries) - skip
        positions = tiles.positions[index] + row
        context_len = tiles.positions[index] + length
        q_tile = jax.lax.dynamic_slice_in_dim(q, first, queries).astype(jnp.float32)
        q_tile = q_tile.reshape(queries, num_kv_heads, -1, q.shape[2]) * scale
        table = block_tables[tiles.lanes[index]]

        def kv_tile(kv_index: Int[Array, ""], softmax: Softmax) -> Softmax:
            ids = jax.lax.dynamic_slice_in_dim(table, kv_index * blocks, blocks)
            keys = kv_index * tile + jnp.arange(tile)
            seen = keys[None, :] <= positions[:, None]
            k = _gather(k_pool, layer, ids[None], tokens=tile)[0]
            v = _gather(v_pool, layer, ids[None], tokens=tile)[0]
            v = jnp.where((keys < context_len)[:, None, None], v, 0)
            scores = jnp.einsum("qkgd,ckd->kgqc", q_tile, k, precision=EXACT)
            return _accumulate(softmax, scores, v, seen, "kgqc,ckd->kgqd")

        num_tiles = (context_len + tile - 1) // tile
        softmax = jax.lax.fori_loop(0, num_tiles, kv_tile, _start(q_tile.transpose(1, 2, 0, 3)))
        rows = _finish(softmax).transpose(2, 0, 1, 3).reshape(queries, *q.shape[1:])
        is_ours = ((row >= 0) & (row < length))[:, None, None]
        kept = jax.lax.dynamic_slice_in_dim(out, first, queries)
        rows = jnp.where(is_ours, rows.astype(q.dtype), kept)
        return jax.lax.dynamic_update_slice_in_dim(out, rows, first, 0)

    return jax.lax.fori_loop(0, tiles.used, query_tile, jnp.zeros_like(q))


def _whole_tiles(block_tables: Int[Array | np.ndarray, "B W"], blocks: int) -> Int[Array, "B X"]:
    """The tables, padded with a valid id to a whole number of tiles."""
    return jnp.pad(block_tables, ((0, 0), (0, -block_tables.shape[1] % blocks)))


def _gather(
    pool: Shaped[Array, "L N S K D"],
    layer: Int[Array, ""],
    block_ids: Int[Array, "B X"],
    *,
    tokens: int,
) -> Float[Array, "B C K D"]:
    """The blocks' rows as float32, `tokens` per lane.

    A bfloat16 pool may be stored as uint16: XLA on CPU would otherwise move the conversion in
    front of the gather and out of the loop, and convert the whole pool on every step.
    """
    rows = pool[layer, block_ids].reshape(block_ids.shape[0], tokens, *pool.shape[3:])
    if rows.dtype == jnp.uint16:
        rows = jax.lax.bitcast_convert_type(rows, jnp.bfloat16)
    return rows.astype(jnp.float32)


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


def _finish(softmax: Softmax) -> Float[Array, "*R D"]:
    # Rows that saw no key (unused lanes, queries outside the tile) come out as zero.
    return softmax.weighted / jnp.where(softmax.total > 0, softmax.total, 1.0)[..., None]
