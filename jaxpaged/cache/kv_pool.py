"""The KV pool: preallocated keys and values of all blocks for all layers, written functionally.

The order of the pool's axes is fixed here and nowhere else: layer, block, slot in the block, head,
width. A token's keys of one layer are one contiguous row, and a block's are contiguous too. The
scales of quantised rows lie in arrays of the same leading axes, so whatever moves blocks moves
their scales as well.

Every function that returns a pool changes it in place where its argument is donated.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from jaxpaged.shapes import AnyArray
from pallas_kernels import KVDType, KVRows, kv_format


class KVPool(NamedTuple):
    """Keys and values of every block; donated to the step and handed back by it."""

    k: KVRows
    """Keys, rotated."""
    v: KVRows
    """Values, in the form of the keys."""


def allocate(
    shape: tuple[int, int, int, int, int],
    kv_dtype: KVDType,
    *,
    as_bits: bool,
    new: Callable[[tuple[int, ...], jnp.dtype], Array] = jnp.zeros,
) -> KVPool:
    """A pool for the shape `(L, N, S, K, D)`.

    Attention never lets the content of an unwritten slot through, so blocks need no clearing when
    they change hands.

    Args:
        shape: Layers, blocks, slots per block, key/value heads, head width.
        kv_dtype: How rows are stored.
        as_bits: Store floats as their bits, as the CPU needs it; see `kv_format`.
        new: Makes an array, of zeros or of anything.

    Raises:
        ValueError: The format cannot store rows of this width.
    """
    dtype, width, has_scales = kv_format.storage(kv_dtype, shape[-1], as_bits=as_bits)

    def rows() -> KVRows:
        scales = new(shape[:-1], jnp.dtype(jnp.float32)) if has_scales else None
        return KVRows(new((*shape[:-1], width), dtype), scales)

    return KVPool(rows(), rows())


def write(
    pool: KVPool,
    layer: Int[Array, ""],
    slot_mapping: Int[AnyArray, " T"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
) -> KVPool:
    """The pool with the tokens' keys and values, encoded, in their slots of one layer.

    Slots at or above `N * S` are padding: their writes are dropped.
    """

    def written(rows: KVRows, x: Float[Array, "T K D"]) -> KVRows:
        encoded = KVRows(*kv_format.encode(x, rows))
        return jax.tree.map(
            lambda old, new: _set_slots(old, layer, slot_mapping, new), rows, encoded
        )

    return KVPool(written(pool.k, k), written(pool.v, v))


def copy_blocks(pool: KVPool, sources: Int[AnyArray, " R"], targets: Int[AnyArray, " R"]) -> KVPool:
    """The pool with the content of blocks `sources` in blocks `targets` too, in all layers.

    Targets at or above `N` are padding and dropped. All sources are read before any is written.
    """
    return write_blocks(pool, targets, read_blocks(pool, sources))


def read_blocks(pool: KVPool, block_ids: Int[AnyArray, " R"]) -> KVPool:
    """The blocks' stored rows of all layers, as a pool of `R` blocks; ids must be valid."""
    return jax.tree.map(lambda x: x.at[:, block_ids].get(mode="promise_in_bounds"), pool)


def write_blocks(pool: KVPool, block_ids: Int[AnyArray, " R"], blocks: KVPool) -> KVPool:
    """The pool with the rows that `read_blocks` gave in blocks `block_ids`.

    Ids at or above `N` are padding and dropped.
    """
    return jax.tree.map(lambda x, new: x.at[:, block_ids].set(new, mode="drop"), pool, blocks)


def _set_slots(
    array: Shaped[Array, "L N S K *X"],
    layer: Int[Array, ""],
    slot_mapping: Int[AnyArray, " T"],
    rows: Shaped[Array, "T K *X"],
) -> Shaped[Array, "L N S K *X"]:
    # Seen as one row per slot, so that the scatter moves whole rows; the reshapes are free.
    num_layers, num_blocks, block_size = array.shape[:3]
    flat = array.reshape(num_layers, num_blocks * block_size, -1)
    flat = flat.at[layer, slot_mapping].set(rows.reshape(rows.shape[0], -1), mode="drop")
    return flat.reshape(array.shape)
