"""The public functions: check the arguments, then call the backend that computes it.

There is one backend so far, plain XLA, which serves every device.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels import xla

AnyArray = Array | np.ndarray
"""Index arrays may come from the host."""


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
    q: Float[Array, "B H D"],
    k_pool: Shaped[Array, "L N S K D"],
    v_pool: Shaped[Array, "L N S K D"],
    *,
    layer: Int[Array, ""],
    block_tables: Int[AnyArray, "B W"],
    context_lens: Int[AnyArray, " B"],
    num_lanes: Int[AnyArray, ""],
    scale: float,
) -> Float[Array, "B H D"]:
    """Attention of one query token per lane over that lane's blocks.

    The same as `paged_attention_ref` for lanes below `num_lanes`; the others are zero.

    Args:
        q: One rotated query per lane.
        k_pool: Keys of all blocks and layers; bfloat16 may be stored as its bits in uint16.
        v_pool: Values, in the form of the keys.
        layer: Which layer's blocks to read.
        block_tables: Pool block of each logical block; only entries that hold context are read
            for their content, and each must be a valid block id.
        context_lens: Tokens each query attends to, itself included.
        num_lanes: Lanes in use; they are the first ones. Work is least when they are sorted by
            falling context length.
        scale: Factor on the scores, usually `D ** -0.5`.

    Raises:
        ValueError: The query heads are no multiple of the key/value heads.
    """
    _check_heads(q.shape[1], k_pool.shape[3])
    return xla.decode_attention(
        q,
        k_pool,
        v_pool,
        layer=layer,
        block_tables=block_tables,
        context_lens=context_lens,
        num_lanes=num_lanes,
        scale=scale,
    )


def prefill_attention(
    q: Float[Array, "T H D"],
    k_pool: Shaped[Array, "L N S K D"],
    v_pool: Shaped[Array, "L N S K D"],
    *,
    layer: Int[Array, ""],
    block_tables: Int[AnyArray, "B W"],
    tiles: PrefillTiles,
    scale: float,
) -> Float[Array, "T H D"]:
    """Causal attention of ragged query segments over their sequences' blocks.

    The same as `paged_attention_ref` for the queries the tiles cover; the others are zero. The
    keys and values of the segments themselves must be in the pool already.

    Args:
        q: Rotated queries on the flat token axis.
        k_pool: Keys of all blocks and layers; bfloat16 may be stored as its bits in uint16.
        v_pool: Values, in the form of the keys.
        layer: Which layer's blocks to read.
        block_tables: Pool block of each logical block, per lane.
        tiles: The segments, cut into tiles.
        scale: Factor on the scores, usually `D ** -0.5`.

    Raises:
        ValueError: As in `decode_attention`.
    """
    _check_heads(q.shape[1], k_pool.shape[3])
    return xla.prefill_attention(
        q, k_pool, v_pool, layer=layer, block_tables=block_tables, tiles=tiles, scale=scale
    )


def _check_heads(num_heads: int, num_kv_heads: int) -> None:
    if num_heads % num_kv_heads:
        raise ValueError(
            f"{num_heads} query heads are no multiple of {num_kv_heads} key/value heads"
        )
