"""Paged decode attention for NVIDIA Hopper GPUs, by Pallas's Mosaic GPU backend.

Decode attention is cut up as in the Triton kernels and merged by theirs: one warpgroup per query,
key/value head and partition of the sequence's own length leaves a partial result. Neither the
batch nor the block size has a part in how numbers are summed up.

    pool --(block table, TMA)--> ring of key and value tiles --(WGMMA)--> registers

Keys stand on the long side of both products and the query group, padded to eight rows, on the
short one: scores are `K q^T`, 64 by 8, and the result is `V^T weights`, `D` by 8. The other way
round, seven of eight rows of a tensor core's tile would hold no query.

Only bfloat16, heads of 64 or 128 and blocks of 16, 32 or 64 are served. The module needs JAX 0.12
and cannot be imported with an older one; all that knows of Mosaic GPU is in this file.
"""

# Type checkers may see an older JAX, which lacks some names, and find transforms of 0.12 abstract.
# pyright: reportAttributeAccessIssue=false, reportAbstractUsage=false

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import triton
from pallas_kernels.kv_format import KVRows
from pallas_kernels.partials import PARTITION_TOKENS, Partials
from pallas_kernels.triton import MASKED

if jax.__version_info__ < (0, 12):
    raise ImportError(
        f"the Mosaic GPU kernels need JAX 0.12 or newer and this is {jax.__version__}: "
        "update JAX (which needs Python 3.12) or use another backend"
    )

AnyArray = Array | np.ndarray

HEAD_DIMS = (64, 128)
BLOCK_SIZES = (16, 32, 64)
LARGEST_GROUP = 32
"""Query heads of a key/value head: 64 take all registers there are, and 72 are spilled."""

TILE_KEYS = 64
"""Keys of a tile: the rows of one WGMMA."""
GROUP_ROWS = 8
"""The query group is padded to a multiple of this, the smallest width of a WGMMA."""
RING_BYTES = 64 * 1024
"""Size of the ring. Three of them fit into a multiprocessor, and one hides the way to memory."""

# Rows of 64 numbers, as wide as the widest swizzle, so that WGMMA reads them without conflicts.
_TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

_LOG2E = math.log2(math.e)


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
    interpret: bool | plgpu.InterpretGPUParams = False,
) -> Float[Array, "T H D"]:
    """Decode attention; see `pallas_kernels.api.decode_attention`.

    Raises:
        ValueError: A dtype, head width, block size or query group that this kernel does not serve.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_layers, num_blocks, block_size, num_kv_heads, _ = k.values.shape
    objection = unserved(
        (q.dtype.name, k.values.dtype.name, v.values.dtype.name),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
    )
    if objection:
        raise ValueError(objection)
    group = num_heads // num_kv_heads
    rows = pl.cdiv(group, GROUP_ROWS) * GROUP_ROWS
    ends = jnp.where(jnp.arange(num_tokens) < num_queries, jnp.asarray(context_lens), 0)
    starts = jnp.maximum(ends - jnp.asarray(window), 0)
    num_partitions = pl.cdiv(block_tables.shape[1] * block_size, PARTITION_TOKENS)
    parts = (num_tokens, num_kv_heads, num_partitions)
    # TMA takes five axes, two of which are the tiles': so all arrays are flattened to three.
    grouped = q.reshape(num_tokens * num_kv_heads, group, head_dim)
    grouped = jnp.pad(grouped, ((0, 0), (0, rows - group), (0, 0)))
    pool = (num_layers * num_blocks, block_size, num_kv_heads * head_dim)
    stages = RING_BYTES // (2 * TILE_KEYS * head_dim * k.values.dtype.itemsize)
    tiles = plgpu.SMEM((stages, TILE_KEYS, head_dim), jnp.bfloat16, transforms=_TILED)
    # Each block that is copied arrives by itself.
    tiles_here = plgpu.Barrier(num_arrivals=TILE_KEYS // block_size, num_barriers=stages)
    weighted, peak, total = plgpu.kernel(
        functools.partial(
            _decode_kernel,
            num_blocks=num_blocks,
            block_size=block_size,
            parts=parts,
            scale=scale,
            soft_cap=soft_cap,
        ),
        out_type=(
            jax.ShapeDtypeStruct((math.prod(parts), group, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((math.prod(parts), rows), jnp.float32),
            jax.ShapeDtypeStruct((math.prod(parts), rows), jnp.float32),
        ),
        scratch_types={
            "q_tile": plgpu.SMEM((rows, head_dim), jnp.bfloat16, transforms=_TILED),
            "k_tiles": tiles,
            "v_tiles": tiles,
            "weights_tile": plgpu.SMEM((rows, TILE_KEYS), jnp.bfloat16, transforms=_TILED),
            "out_tile": plgpu.SMEM((rows, head_dim), jnp.float32),
            "q_here": plgpu.Barrier(),
            "k_here": tiles_here,
            "v_here": tiles_here,
        },
        grid=parts,
        grid_names=("query", "head", "partition"),
        # Approximate exp2 errs in the last bits of float32, approximate tanh by far more.
        compiler_params=plgpu.CompilerParams(approx_math=soft_cap is None),
        interpret=plgpu.InterpretGPUParams() if interpret is True else interpret or None,
        kernel_name="paged_decode_hopper",
    )(
        jnp.asarray(layer).reshape(1),
        starts,
        ends,
        jnp.asarray(token_lanes),
        jnp.asarray(block_tables),
        grouped,
        k.values.reshape(pool),
        v.values.reshape(pool),
    )
    partials = Partials(
        weighted.reshape(*parts, group, head_dim),
        peak[:, :group].reshape(*parts, group),
        total[:, :group].reshape(*parts, group),
    )
    merged = triton.combine(partials, starts, ends, q.dtype, interpret=bool(interpret))
    return merged.reshape(q.shape)


def _decode_kernel(
    layer_ref,  # [1]
    starts_ref,  # [T]
    ends_ref,  # [T]
    lanes_ref,  # [T]
    tables_ref,  # [B, W]
    q_ref,  # [T * K, rows, D]
    k_ref,  # [L * N, S, K * D]
    v_ref,  # [L * N, S, K * D]
    weighted_ref,  # [T * K * P, G, D]
    peak_ref,  # [T * K * P, rows]
    total_ref,  # [T * K * P, rows]
    *,
    q_tile,
    k_tiles,
    v_tiles,
    weights_tile,
    out_tile,
    q_here,
    k_here,
    v_here,
    num_blocks: int,
    block_size: int,
    parts: tuple[int, int, int],
    scale: float,
    soft_cap: float | None,
) -> None:
    query, head, partition = (lax.axis_index(axis) for axis in ("query", "head", "partition"))
    num_kv_heads, num_partitions = parts[1:]
    stages, rows, head_dim = k_tiles.shape[0], *q_tile.shape
    first = partition * PARTITION_TOKENS
    start = jnp.maximum(starts_ref[query], first)
    end = jnp.minimum(ends_ref[query], first + PARTITION_TOKENS)

    @pl.when(start < end)
    def _() -> None:
        first_tile = lax.div(start, TILE_KEYS)
        num_tiles = lax.div(end - 1, TILE_KEYS) + 1 - first_tile
        first_block, last_block = lax.div(start, block_size), lax.div(end - 1, block_size)
        lane, base = lanes_ref[query], layer_ref[0] * num_blocks
        columns = pl.ds(head * head_dim, head_dim)

        def fetch(pool_ref, tiles, here, index) -> None:
            slot = lax.rem(index, stages)
            for part in range(TILE_KEYS // block_size):
                # No id of a block without a key that is seen is read: the nearest one with such
                # a key is copied instead, for the arrivals and bytes the barrier waits for.
                logical = (first_tile + index) * (TILE_KEYS // block_size) + part
                logical = jnp.minimum(jnp.maximum(logical, first_block), last_block)
                block = base + tables_ref[lane, logical]
                place = tiles.at[slot, pl.ds(part * block_size, block_size)]
                plgpu.copy_gmem_to_smem(pool_ref.at[block, :, columns], place, here.at[slot])

        def fetch_next(pool_ref, tiles, here, index) -> None:
            @pl.when(index < num_tiles)
            def _() -> None:
                fetch(pool_ref, tiles, here, index)

        def seen_in(index, width: int):
            """Whether each key of a tile is seen, `width` times."""
            begin = (first_tile + index) * TILE_KEYS
            shape, layout = (TILE_KEYS, width), plgpu.Layout.WGMMA
            keys = begin + plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
            return (keys >= start) & (keys < end)

        def tile(index, softmax):
            peak, total, weighted = softmax
            slot = lax.rem(index, stages)
            plgpu.barrier_wait(k_here.at[slot])
            scores = _product(k_tiles.at[slot], q_tile.transpose((1, 0))) * scale
            fetch_next(k_ref, k_tiles, k_here, index + stages)
            if soft_cap is not None:
                scores = soft_cap * jnp.tanh(scores / soft_cap)
            # Every tile has a key that is seen, so the weight of the others is zero.
            scores = jnp.where(seen_in(index, rows), scores, MASKED)
            new_peak = jnp.maximum(peak, jnp.max(scores, axis=0))
            shrink = _exp(peak - new_peak)
            weights = _exp(scores - lax.broadcast_in_dim(new_peak, scores.shape, [1]))
            total = total * shrink + jnp.sum(weights, axis=0)
            weights_tile.transpose((1, 0))[...] = weights.astype(weights_tile.dtype)
            plgpu.barrier_wait(v_here.at[slot])
            begin = (first_tile + index) * TILE_KEYS

            @pl.when((begin < start) | (begin + TILE_KEYS > end))
            def _() -> None:
                # What lies outside the context may be NaN, which a weight of zero does not hide.
                v_tile = v_tiles[slot]
                v_tiles[slot] = jnp.where(seen_in(index, head_dim), v_tile, jnp.zeros_like(v_tile))

            # Tensor cores see what registers wrote to shared memory only behind this.
            plgpu.commit_smem()
            seen_now = _product(v_tiles.at[slot].transpose((1, 0)), weights_tile.transpose((1, 0)))
            fetch_next(v_ref, v_tiles, v_here, index + stages)
            weighted *= lax.broadcast_in_dim(shrink, weighted.shape, [1])
            return new_peak, total, weighted + seen_now

        plgpu.copy_gmem_to_smem(q_ref.at[query * num_kv_heads + head], q_tile, q_here)
        for stage in range(stages):
            fetch_next(k_ref, k_tiles, k_here, jnp.int32(stage))
            fetch_next(v_ref, v_tiles, v_here, jnp.int32(stage))
        plgpu.barrier_wait(q_here)
        of_row = plgpu.Layout.WGMMA.reduce(0)
        nothing = (
            plgpu.layout_cast(jnp.full((rows,), MASKED, jnp.float32), of_row),
            plgpu.layout_cast(jnp.zeros((rows,), jnp.float32), of_row),
            plgpu.layout_cast(jnp.zeros((head_dim, rows), jnp.float32), plgpu.Layout.WGMMA),
        )
        peak, total, weighted = lax.fori_loop(0, num_tiles, tile, nothing)
        place = (query * num_kv_heads + head) * num_partitions + partition
        # Neither of the three is worth an access without conflicts: it is once per partition.
        plgpu.store(peak_ref.at[place], peak, optimized=False)
        plgpu.store(total_ref.at[place], total, optimized=False)
        weighted = plgpu.layout_cast(weighted, plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.store(out_tile.transpose((1, 0)), weighted, optimized=False)
        plgpu.commit_smem()
        # The padding of the group stays behind.
        group = pl.ds(0, weighted_ref.shape[1])
        plgpu.copy_smem_to_gmem(out_tile.at[group], weighted_ref.at[place])
        plgpu.wait_smem_to_gmem(0)


def _product(a_ref, b_ref):
    """`a @ b` in float32, both in shared memory; they may be overwritten after it."""

    def multiply(sum_ref):
        plgpu.wgmma(sum_ref, a_ref, b_ref)
        return sum_ref[...]

    return pl.run_scoped(
        multiply, plgpu.WGMMAAccumulatorRef((a_ref.shape[0], b_ref.shape[1]), jnp.float32)
    )


def _exp(x):
    return jnp.exp2(x * _LOG2E)


def unserved(
    dtypes: tuple[str, ...], *, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int
) -> str | None:
    """What the kernel does not serve, if anything.

    Args:
        dtypes: Of queries, keys and values.
        num_heads: Query heads.
        num_kv_heads: Key/value heads.
        head_dim: Numbers of a head.
        block_size: Slots of a block.
    """
    if set(dtypes) != {"bfloat16"}:
        return f"the Hopper kernel serves bfloat16 only, not {dtypes}"
    if head_dim not in HEAD_DIMS:
        return f"the Hopper kernel serves head widths {HEAD_DIMS}, not {head_dim}"
    if block_size not in BLOCK_SIZES:
        return f"the Hopper kernel serves block sizes {BLOCK_SIZES}, not {block_size}"
    if num_heads > LARGEST_GROUP * num_kv_heads:
        return (
            f"the Hopper kernel serves up to {LARGEST_GROUP} query heads to a key/value head, "
            f"and these are {num_heads} to {num_kv_heads}"
        )
    return None
