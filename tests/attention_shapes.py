"""Named shapes of paged attention, shared by tests and benchmarks, and arrays to go with them."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from pallas_kernels import PrefillTiles
from pallas_kernels.xla import TILE_QUERIES


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Sizes of one case; `context_lens` are per lane."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    context_lens: tuple[int, ...]
    dtype: str = "float32"


SHAPES = {
    "smollm2_9_3": AttentionShape(
        num_heads=9, num_kv_heads=3, head_dim=64, block_size=16, context_lens=(1, 15, 16, 17, 200)
    ),
    "llama_32_8": AttentionShape(
        num_heads=32, num_kv_heads=8, head_dim=128, block_size=16, context_lens=(1, 31, 32, 33)
    ),
    "no_groups": AttentionShape(
        num_heads=4, num_kv_heads=4, head_dim=8, block_size=4, context_lens=(3, 4, 5, 127, 128, 129)
    ),
    "one_kv_head_odd_block": AttentionShape(
        num_heads=5, num_kv_heads=1, head_dim=16, block_size=5, context_lens=(64, 65, 1, 60) * 3
    ),
    "block_of_one": AttentionShape(
        num_heads=4, num_kv_heads=2, head_dim=8, block_size=1, context_lens=(1, 2, 70)
    ),
    "block_above_tile": AttentionShape(
        num_heads=4, num_kv_heads=2, head_dim=8, block_size=256, context_lens=(255, 256, 257)
    ),
    "bfloat16": AttentionShape(
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        block_size=16,
        context_lens=(1, 16, 90),
        dtype="bfloat16",
    ),
}

TOLERANCE = {"float32": 1e-5, "bfloat16": 8e-3}
"""Largest absolute error against the reference for inputs of unit variance.

float32: scores reach 15 here, so their own rounding (1e-6) is relative to each weight. bfloat16:
one rounding of the result, half a unit in the last of 8 bits.
"""


def pools(shape: AttentionShape, seed: int = 0, num_layers: int = 2):
    """K and V pools, poisoned wherever no lane's context lies, and the block tables.

    Returns:
        k_pool, v_pool, block_tables (shuffled, each lane its own blocks).
    """
    rng = np.random.default_rng(seed)
    size = shape.block_size
    needed = [-(-n // size) for n in shape.context_lens]
    width = max(needed) + 1
    # The first and the last block stay unused, so that a clipped or wrapped id reads poison.
    num_blocks = sum(needed) + 3
    free = iter(rng.permutation(np.arange(1, num_blocks - 1)))
    tables = np.full((len(needed), width), num_blocks - 1, np.int32)
    live = np.zeros((num_blocks, size), bool)
    for lane, count in enumerate(needed):
        tables[lane, :count] = [next(free) for _ in range(count)]
        positions = np.arange(shape.context_lens[lane])
        live[tables[lane, positions // size], positions % size] = True
    full = (num_layers, num_blocks, size, shape.num_kv_heads, shape.head_dim)
    k, v = (rng.standard_normal(full).astype(np.float32) for _ in range(2))
    for pool in (k, v):
        pool[:, ~live] = np.nan
    dtype = jnp.dtype(shape.dtype)
    return jnp.asarray(k, dtype), jnp.asarray(v, dtype), jnp.asarray(tables)


def queries(shape: AttentionShape, num_tokens: int, seed: int = 1):
    """Unit-variance queries, `[num_tokens, H, D]`."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((num_tokens, shape.num_heads, shape.head_dim))
    return jnp.asarray(q, jnp.dtype(shape.dtype))


def prefill_tiles(starts: list[int], lens: list[int], positions: list[int]) -> PrefillTiles:
    """Tiles of one segment per lane; lanes count up from 0. One unused tile at the end."""
    rows = [
        (lane, starts[lane] + at, min(TILE_QUERIES, lens[lane] - at), positions[lane] + at)
        for lane in range(len(lens))
        for at in range(0, lens[lane], TILE_QUERIES)
    ]
    columns = [jnp.asarray([*column, 0], jnp.int32) for column in zip(*rows, strict=True)]
    return PrefillTiles(*columns, jnp.asarray(len(rows), jnp.int32))
