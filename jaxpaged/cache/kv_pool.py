"""The KV pool: preallocated keys and values of all blocks for all layers, written functionally.

The order of the pool's axes is fixed here and nowhere else: layer, block, slot in the block, head,
width. A token's keys of one layer are one contiguous row, and a block's are contiguous too.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from jaxpaged.shapes import AnyArray


class KVPool(NamedTuple):
    """Keys and values of every block; donated to the step and handed back by it."""

    k: Shaped[Array, "L N S K D"]
    """Keys, rotated; bfloat16 is stored as uint16 on the CPU."""
    v: Shaped[Array, "L N S K D"]
    """Values, in the form of the keys."""


def allocate(shape: tuple[int, int, int, int, int], dtype: jnp.dtype, *, as_bits: bool) -> KVPool:
    """A pool of zeros of the shape `(L, N, S, K, D)`.

    Attention never lets the content of an unwritten slot through, so blocks need no clearing when
    they change hands.

    Args:
        shape: Layers, blocks, slots per block, key/value heads, head width.
        dtype: float32 or bfloat16.
        as_bits: Store bfloat16 as uint16, which keeps XLA on CPU from converting the whole pool.
    """
    stored = jnp.uint16 if as_bits and dtype == jnp.bfloat16 else dtype
    return KVPool(jnp.zeros(shape, stored), jnp.zeros(shape, stored))


def write(
    pool: KVPool,
    layer: Int[Array, ""],
    slot_mapping: Int[AnyArray, " T"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
) -> KVPool:
    """The pool with the tokens' keys and values in their slots of one layer.

    Slots at or above `N * S` are padding: their writes are dropped.
    """
    return KVPool(
        _write_rows(pool.k, layer, slot_mapping, k), _write_rows(pool.v, layer, slot_mapping, v)
    )


def _write_rows(
    rows: Shaped[Array, "L N S K D"],
    layer: Int[Array, ""],
    slot_mapping: Int[AnyArray, " T"],
    values: Float[Array, "T K D"],
) -> Shaped[Array, "L N S K D"]:
    if rows.dtype == jnp.uint16:
        values = jax.lax.bitcast_convert_type(values.astype(jnp.bfloat16), jnp.uint16)
    # Seen as one row per slot, so that the scatter moves whole rows; the reshapes are free.
    num_layers, num_blocks, block_size = rows.shape[:3]
    flat = rows.reshape(num_layers, num_blocks * block_size, -1)
    values = values.reshape(values.shape[0], -1).astype(rows.dtype)
    flat = flat.at[layer, slot_mapping].set(values, mode="drop")
    return flat.reshape(rows.shape)
