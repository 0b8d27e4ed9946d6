"""The public functions: check the arguments, then call the backend that was asked for.

Never another one than that: what a backend cannot do, it refuses. With JAX's own checks on
(`JAX_ENABLE_CHECKS=1`) block ids are looked at, too.
"""

from types import ModuleType
from typing import Literal, NamedTuple, get_args

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels import kv_format, llvm, triton, xla
from pallas_kernels.debug import check_block_ids
from pallas_kernels.kv_format import KVRows
from pallas_kernels.partials import PARTITION_TOKENS, Partials

AnyArray = Array | np.ndarray
"""Index arrays may come from the host."""

Implementation = Literal[
    "xla", "llvm", "triton", "triton_interpreted", "mosaic", "mosaic_interpreted"
]
"""Who computes attention: plain XLA on any device; kernels for the CPU at hand; Pallas kernels for
NVIDIA GPUs, of the Triton backend (Ampere and later) or of Mosaic GPU (decode on Hopper); or those
in Pallas's interpreters, which show on a CPU that they are right and are slow."""

NO_WINDOW = 2**30
"""A window wider than any context: every query attends to all keys up to its own."""


class PrefillTiles(NamedTuple):
    """The ragged prefill segments of a step, cut into tiles of consecutive query tokens.

    A segment is the chunk of one sequence; its tokens are consecutive on the flat token axis and
    a tile never crosses a segment's end. Only the first `used` tiles are read.
    """

    lanes: Int[AnyArray, " P"]
    """Row of the block tables the tile's sequence has."""
    starts: Int[AnyArray, " P"]
    """Index of the tile's first query on the flat token axis."""
    lens: Int[AnyArray, " P"]
    """Queries in the tile, at most `xla.TILE_QUERIES`."""
    positions: Int[AnyArray, " P"]
    """Position of the tile's first query in its sequence."""
    used: Int[AnyArray, ""]
    """Tiles in use."""


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
    implementation: Implementation = "xla",
) -> Float[Array, "T H D"]:
    """Attention of the first `num_queries` tokens, each by itself, over its lane's blocks.

    The same as `paged_attention_ref` for these queries; the others are zero. A query's result
    has the same bits whatever stands beside it and whatever the block size is.

    Args:
        q: Rotated queries on the flat token axis.
        k: Keys of all blocks and layers.
        v: Values, in the form of the keys.
        layer: Which layer's blocks to read.
        block_tables: Pool block of each logical block; only entries that hold keys in a query's
            window are read for their content, and each must be a valid block id.
        token_lanes: Row of the block tables of each query; several queries may share one.
        context_lens: Tokens of the lane up to each query, itself included.
        num_queries: Queries to compute. Work is least when they are sorted by context length.
        window: Keys a query attends to, its own included: those at `i - window + 1` to `i` for
            position `i`. `NO_WINDOW` means all.
        scale: Factor on the scores, usually `D ** -0.5`.
        soft_cap: Scores become `soft_cap * tanh(score / soft_cap)`, as in Gemma 2.
        implementation: Who computes it.

    Raises:
        ValueError: No such implementation; query heads that are no multiple of the key/value heads;
            queries, keys and values that do not go together; what the backend does not serve.
    """
    _check(implementation, q, k, v)
    ends = jnp.where(jnp.arange(q.shape[0]) < num_queries, context_lens, 0)
    starts = jnp.maximum(ends - window, 0)
    check_block_ids(block_tables, token_lanes, starts, ends, pool=k)
    return _backend(implementation).decode_attention(
        q,
        k,
        v,
        layer=layer,
        block_tables=block_tables,
        token_lanes=token_lanes,
        context_lens=context_lens,
        num_queries=num_queries,
        window=window,
        scale=scale,
        soft_cap=soft_cap,
        **_options(implementation),
    )


def prefill_attention(
    q: Float[Array, "T H D"],
    k: KVRows,
    v: KVRows,
    *,
    layer: Int[Array, ""],
    block_tables: Int[AnyArray, "B W"],
    tiles: PrefillTiles,
    window: Int[AnyArray, ""],
    scale: float,
    onto: Float[Array, "T H D"] | None = None,
    soft_cap: float | None = None,
    implementation: Implementation = "xla",
) -> Float[Array, "T H D"]:
    """Causal attention of ragged query segments over their sequences' blocks.

    The same as `paged_attention_ref` for the queries the tiles cover; the others are left. The
    keys and values of the segments themselves must be in the pool already. A query's result has
    the same bits however its sequence is cut into segments and whatever the block size is.

    Args:
        q: Rotated queries on the flat token axis.
        k: Keys of all blocks and layers.
        v: Values, in the form of the keys.
        layer: Which layer's blocks to read.
        block_tables: As in `decode_attention`.
        tiles: The segments, cut into tiles.
        window: As in `decode_attention`.
        scale: Factor on the scores, usually `D ** -0.5`.
        onto: What it is written onto, in place where it can be; None takes zeros.
        soft_cap: Scores become `soft_cap * tanh(score / soft_cap)`, as in Gemma 2.
        implementation: Who computes it.

    Raises:
        ValueError: As in `decode_attention`.
    """
    _check(implementation, q, k, v)
    if implementation.startswith("mosaic"):
        raise ValueError("there is no prefill attention by Mosaic GPU; use triton or xla")
    lens = jnp.where(jnp.arange(tiles.lens.shape[0]) < tiles.used, tiles.lens, 0)
    starts = jnp.maximum(tiles.positions - window + 1, 0)
    ends = jnp.where(lens > 0, tiles.positions + lens, 0)
    check_block_ids(block_tables, tiles.lanes, starts, ends, pool=k)
    return _backend(implementation).prefill_attention(
        q,
        k,
        v,
        jnp.zeros_like(q) if onto is None else onto,
        layer=layer,
        block_tables=block_tables,
        tiles=tiles,
        window=window,
        scale=scale,
        soft_cap=soft_cap,
        **_options(implementation),
    )


def combine(
    partials: Partials,
    starts: Int[Array, " T"],
    ends: Int[Array, " T"],
    *,
    dtype: jnp.dtype,
    implementation: Implementation = "xla",
) -> Float[Array, "T K G D"]:
    """The attention that the partitions of each query come to; the same as `combine_ref`.

    The last step of decode attention by kernels; also for partial results from elsewhere.

    Args:
        partials: Of each partition; those that do not hold a key of the query are not read.
        starts: The first key of each query.
        ends: The key behind its last one; a query whose end is not above its start gets zeros.
        dtype: Of the result; sums are in float32.
        implementation: Who computes it. Mosaic GPU leaves it to Triton, as its decode does; the
            kernels for CPUs, which have no partitions, to XLA.
    """
    _check_name(implementation)
    # The kernel reads what it is told to: so nothing outside the arrays, and nothing for a query
    # that sees nothing.
    reach = partials.peak.shape[2] * PARTITION_TOKENS
    ends = jnp.where(starts < ends, jnp.minimum(ends, reach), 0)
    starts = jnp.minimum(starts, ends)
    if implementation in ("xla", "llvm"):
        return xla.combine(partials, starts, ends, dtype)
    return triton.combine(partials, starts, ends, dtype, **_options(implementation))


def _backend(implementation: Implementation) -> ModuleType:
    if implementation == "llvm":
        # Needs numba, which is an extra.
        from pallas_kernels.llvm import attention

        return attention
    if implementation.startswith("mosaic"):
        # Needs a newer JAX than the others.
        from pallas_kernels import mosaic

        return mosaic
    return xla if implementation == "xla" else triton


def _options(implementation: Implementation) -> dict[str, bool]:
    if implementation in ("xla", "llvm"):
        return {}
    return {"interpret": implementation.endswith("_interpreted")}


def _check(implementation: Implementation, q: Array, k: KVRows, v: KVRows) -> None:
    _check_name(implementation)
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = k.values.shape[3]
    if num_heads % num_kv_heads:
        raise ValueError(
            f"{num_heads} query heads are no multiple of {num_kv_heads} key/value heads"
        )
    keys, values = (
        (rows.values.shape, rows.values.dtype.name, rows.scales is not None) for rows in (k, v)
    )
    if keys != values:
        raise ValueError(f"keys are {keys} and values {values}; expected one shape and format")
    if kv_format.width(k) != head_dim:
        raise ValueError(f"queries are {head_dim} wide and keys {kv_format.width(k)}")
    if implementation == "llvm":
        kv_dtype = "float32" if k.values.dtype == jnp.float32 else k.values.dtype.name
        why = llvm.unserved(dtype=q.dtype.name, kv_dtype=kv_dtype, head_dim=head_dim)
        if why:
            raise ValueError(why)


def _check_name(implementation: Implementation) -> None:
    known = get_args(Implementation)
    if implementation not in known:
        raise ValueError(f"there is no implementation {implementation!r}; expected one of {known}")
